"""What a user installs: the sdist and the wheel, built from what git has, tried in an environment of their own."""

import importlib.metadata
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import uniep

REPOSITORY = Path(__file__).parents[2]


def run(*command: object, **options) -> str:
    done = subprocess.run(
        list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120, **options
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}"
    return done.stdout


def environment(**more: str) -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"} | more


def there(needed: Requirement) -> bool:
    try:
        return importlib.metadata.version(needed.name) in needed.specifier
    except importlib.metadata.PackageNotFoundError:
        return False


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """(sdist, wheel), the wheel made from the sdist, of the files that git knows, as they are now."""
    folder = tmp_path_factory.mktemp("release")
    if not (REPOSITORY / ".git").exists():
        pytest.skip("needs a clone, of which git says what belongs to it")
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    for needed in map(Requirement, project["optional-dependencies"]["test"]):
        if needed.name in ("build", "setuptools") and not there(needed):
            pytest.fail(f"needs {needed.name}: {sys.executable} -m pip install '{needed}'", pytrace=False)
    for name in run("git", "-C", REPOSITORY, "ls-files").splitlines():
        if (REPOSITORY / name).exists():
            (folder / "clone" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "clone" / name).write_bytes((REPOSITORY / name).read_bytes())
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", folder / "clone")
    (sdist,), (wheel,) = (folder / "dist").glob("*.tar.gz"), (folder / "dist").glob("*.whl")
    return sdist, wheel


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """The bin folder of an environment with the wheel, and of everything else what this one has."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    install = ("install", "--quiet", "--no-deps", "--no-index", built[1])
    run(sys.executable, "-m", "pip", "--python", python, *install, env=environment())
    place = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    # Packages are found there, but not this clone: .pth files in that folder are not read.
    (place / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"


def test_both_hold_the_library_and_nothing_else(built):
    sdist, wheel = built
    known = run("git", "-C", REPOSITORY, "ls-files", "src/uniep").splitlines()
    wanted = {name.removeprefix("src/") for name in known if (REPOSITORY / name).exists()}
    in_wheel = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert in_wheel == wanted
    with tarfile.open(sdist) as archive:
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}
    rest = {name for name in names if not name.startswith("src/")}
    assert {name.removeprefix("src/") for name in names if name.startswith("src/uniep/")} == wanted
    assert rest == {
        "CHANGELOG.md", "LICENSE", "MANIFEST.in", "PKG-INFO", "README.md", "pyproject.toml", "setup.cfg",
    }  # fmt: skip


def test_the_version_is_written_in_one_place(built):
    version = uniep.__version__
    assert {path.name.removeprefix("uniep-").split("-py3")[0].removesuffix(".tar.gz") for path in built} == {version}
    files = [*(REPOSITORY / "src" / "uniep").rglob("*.py"), REPOSITORY / "pyproject.toml"]
    assert [path.name for path in files if f'"{version}"' in path.read_text()] == ["version.py"]
    latest = re.search(r"^## (\S+)", (REPOSITORY / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert latest and latest[1] == version


@pytest.mark.slow
def test_an_installed_wheel_runs_the_readmes_first_script(installed, tmp_path):
    script = tmp_path / "this.py"
    script.write_text(re.search(r"```python\n(.*?)```", (REPOSITORY / "README.md").read_text(), re.DOTALL)[1])
    out = run(
        installed / "python", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, script,
        env=environment(), cwd=tmp_path,
    )  # fmt: skip
    assert "step 2" in out
    where = run(installed / "python", "-c", "import uniep; print(uniep.__file__)", env=environment(), cwd=tmp_path)
    assert where.startswith(str(installed.parent))


def test_the_command_without_its_extra_says_what_to_install(installed, tmp_path):
    assert run(installed / "uniep", "--version", env=environment()) == f"uniep {uniep.__version__}\n"
    (tmp_path / "typer.py").write_text("raise ModuleNotFoundError('no typer', name='typer')\n")
    done = subprocess.run(
        [installed / "uniep", "doctor"], env=environment(PYTHONPATH=str(tmp_path)), capture_output=True, text=True,
        timeout=60,
    )  # fmt: skip
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
    assert "pip install typer rich matplotlib" in done.stderr
