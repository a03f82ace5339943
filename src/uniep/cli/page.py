"""timeline.html: one page that needs nothing else, with the tasks of every worker and how their time was spent."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from uniep.cli.timeline import kind_of, kinds_of
from uniep.taskflow.graph import GATE
from uniep.taskflow.trace import Shares, Span, lanes_of, phases_of, shares, window

PARTS = {"busy": "#5c677d", "exposed": "#e03131", "waiting": "#e0a800", "idle": "#c3c8d4"}
_MEANING = {
    "busy": "running a task",
    "exposed": "waiting for peers: their tokens or results are on the way, or not computed yet",
    "waiting": "waiting for tasks of the same rank",
    "idle": "no task left, or none taken yet",
}


def write_page(spans: Sequence[Span], about: Mapping[str, str], path: Path) -> None:
    """about: lines under the title, {name: text}."""
    found = shares(spans)
    lines = "".join(f"<dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd>" for k, v in about.items())
    sections = "".join(_section(phase, [s for s in found if s.phase == phase]) for phase in phases_of(spans))
    key = "".join(f'<span><i style="background:{color}"></i>{_MEANING[part]}</span>' for part, color in PARTS.items())
    # Inside <script> a browser looks for tags even in strings.
    data = json.dumps(_data(spans), separators=(",", ":")).replace("<", "\\u003c")
    parts = {"ABOUT": lines, "KEY": key, "SECTIONS": sections, "DATA": data}
    page = re.sub("@(ABOUT|KEY|SECTIONS|DATA)@", lambda found: parts[found[1]], _PAGE)
    path.write_text(page, encoding="utf-8")


def _section(phase: str, found: Sequence[Shares]) -> str:
    rows = ""
    for s in found:
        parts = {part: getattr(s, part) for part in PARTS}
        bar = "".join(f'<i style="width:{v:.4%};background:{PARTS[p]}"></i>' for p, v in parts.items())
        cells = "".join(f"<td>{v:.1%}</td>" for v in parts.values())
        rows += f'<tr><th>{html.escape(s.worker)}</th><td class="bar"><div>{bar}</div></td>{cells}</tr>'
    return (
        f'<section data-phase="{html.escape(phase)}"><h2>{html.escape(phase)} <small></small></h2>'
        "<table><tr><th>workers</th><th></th><th>busy</th><th>for peers</th><th>for own rank</th><th>idle</th></tr>"
        f"{rows}</table>"
        '<div class="legend"></div><canvas tabindex="0"></canvas></section>'
    )


def _data(spans: Sequence[Span]) -> dict[str, Any]:
    """Lanes, kinds with their colours, and per phase its length and bars: lane, kind, claimed, start, end (ns from the
    first claim), whether it waits for peers, what it is."""
    lanes = lanes_of(spans)
    at = {lane: number for number, lane in enumerate(lanes)}
    kinds = kinds_of(spans)
    names = list(kinds)
    phases = {}
    for phase in phases_of(spans):
        of_phase = [s for s in spans if s.phase == phase]
        first, last = window(of_phase)
        phases[phase] = {
            "length": last - first,
            "bars": [
                [
                    at[s.rank, s.worker],
                    -1 if s.op == GATE else names.index(kind_of(s)),
                    s.claimed_ns - first,
                    s.start_ns - first,
                    s.end_ns - first,
                    int(s.for_peers),
                    f"{s.op}  group {s.block.group}, rows {s.block.row0}:{s.block.row1}, "
                    f"columns {s.block.column0}:{s.block.column1}",
                ]
                for s in sorted(of_phase, key=lambda s: s.claimed_ns)
            ],
        }
    return {
        "lanes": [[rank, worker] for rank, worker in lanes],
        "kinds": [[kind.color, kind.label] for kind in kinds.values()],
        "phases": phases,
    }


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>uniep trace</title>
<style>
:root{color-scheme:light dark;--ink:#1f2430;--paper:#fff;--muted:#5f6778;--grid:#e3e6eb;--line:#c3c8d4}
@media (prefers-color-scheme:dark){:root{--ink:#e6e9ef;--paper:#14171d;--muted:#9aa3b2;--grid:#2a2f39;--line:#4a5160}}
body{font:14px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);margin:24px auto;max-width:1240px;
padding:0 20px}
h1{font-size:20px;margin:0 0 8px}h2{font-size:16px;margin:28px 0 6px}
small{color:var(--muted);font-weight:400;font-size:13px}
dl{display:grid;grid-template-columns:max-content 1fr;gap:0 14px;margin:0 0 12px}
dt{color:var(--muted)}dd{margin:0}
table{border-collapse:collapse;margin:4px 0 10px}th,td{padding:2px 12px 2px 0;text-align:right;font-weight:400}
th:first-child{text-align:left}td.bar{width:27vw;min-width:90px;max-width:340px}
td.bar div{display:flex;height:13px;border-radius:3px;overflow:hidden}
td.bar i{display:block;height:100%}
.legend span,.key span{display:inline-flex;align-items:center;margin-right:16px;font-size:13px}
.legend i,.key i{width:11px;height:11px;border-radius:2px;margin-right:6px;display:inline-block}
canvas{display:block;width:100%;margin-top:6px;cursor:grab;outline-offset:3px}
#tip{position:fixed;display:none;pointer-events:none;background:#1f2430;color:#fff;border-radius:4px;padding:5px 9px;
font-size:12px;white-space:pre;z-index:2}.hint{color:var(--muted);font-size:13px}
</style></head><body>
<h1>One MoE layer, task by task</h1>
<dl>@ABOUT@</dl>
<div class="key">@KEY@</div>
<p class="hint">Scroll to zoom, drag to move, double-click to see all; arrow keys and + - when a timeline has the
focus. Thin lines are waits.</p>
@SECTIONS@
<div id="tip"></div>
<script>
"use strict";
const data = @DATA@;
const thin = data.lanes.length > 64, LANE = thin ? 5 : 26, GAP = thin ? 0.5 : 4, LINE = thin ? 1 : 2;
const TOP = 6, LEFT = 132, AXIS = 26, EXPOSED = "#e03131", WAITING = "#e0a800";
const group = lane => data.lanes[lane].join(" ").replace(/ \\d+$/, "");  // rank and class
const tip = document.getElementById("tip");
const colour = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const time = ns => ns >= 1e6 ? (ns / 1e6).toFixed(2) + " ms" : (ns / 1e3).toFixed(1) + " \\u00b5s";
const tick = (ns, step) => ns === 0 ? "0" : step >= 1e6 ? ns / 1e6 + " ms" :
  step >= 1e5 ? (ns / 1e6).toFixed(1) + " ms" : (ns / 1e3).toFixed(step >= 1e3 ? 0 : 1) + " \\u00b5s";
const steps = (span, wide) => {
  const raw = span / Math.max(2, Math.min(8, Math.floor((wide - LEFT) / 90))), ten = 10 ** Math.floor(Math.log10(raw));
  return [1, 2, 5, 10].map(k => k * ten).find(s => s >= raw); };
for (const section of document.querySelectorAll("section")) {
  const phase = data.phases[section.dataset.phase], canvas = section.querySelector("canvas");
  const pen = canvas.getContext("2d"), height = TOP + LANE * data.lanes.length + AXIS;
  section.querySelector("small").textContent = time(phase.length);
  let from = 0, to = phase.length, drag = null;
  const used = [...new Set(phase.bars.map(b => b[1]))].filter(k => k >= 0).sort((a, b) => a - b);
  section.querySelector(".legend").append(...used.map(k => { const item = document.createElement("span"),
    box = document.createElement("i"); box.style.background = data.kinds[k][0]; item.append(box, data.kinds[k][1]);
    return item; }));
  const x = ns => LEFT + (ns - from) / (to - from) * (canvas.clientWidth - LEFT);
  const at = px => from + (px - LEFT) / (canvas.clientWidth - LEFT) * (to - from);
  function draw() {
    const wide = canvas.clientWidth, ratio = window.devicePixelRatio || 1;
    canvas.width = wide * ratio; canvas.height = height * ratio; canvas.style.height = height + "px";
    pen.setTransform(ratio, 0, 0, ratio, 0, 0); pen.clearRect(0, 0, wide, height);
    pen.font = "12px system-ui, sans-serif"; pen.textBaseline = "middle";
    const step = steps(to - from, wide), bottom = height - AXIS;
    for (let i = Math.ceil(from / step); i * step <= to; i++) { const t = i * step;
      pen.fillStyle = colour("--grid"); pen.fillRect(x(t), TOP, 1, bottom - TOP);
      pen.fillStyle = colour("--muted"); pen.textAlign = x(t) > wide - 40 ? "right" : "center";
      pen.fillText(tick(t, step), x(t), bottom + 12);
    }
    data.lanes.forEach(([rank, worker], i) => {
      const y = TOP + i * LANE; pen.fillStyle = colour("--ink"); pen.textAlign = "left";
      if (!thin) pen.fillText("rank " + rank + "  " + worker, 0, y + LANE / 2);
      else if (!i || group(i) !== group(i - 1)) pen.fillText("rank " + group(i), 0, y + 8);
      if (i && data.lanes[i - 1][0] !== rank) { pen.fillStyle = colour("--line"); pen.fillRect(0, y, wide, 1); }
    });
    pen.save(); pen.beginPath(); pen.rect(LEFT, 0, wide - LEFT, bottom); pen.clip();
    for (const [lane, op, claimed, start, end, peers] of phase.bars) {
      if (end < from || claimed > to) continue;
      const y = TOP + lane * LANE;
      if (start > claimed) { pen.fillStyle = peers ? EXPOSED : WAITING;
        pen.fillRect(x(claimed), y + (LANE - LINE) / 2, Math.max(x(start) - x(claimed), 0.5), LINE); }
      if (op < 0) continue;
      const width = Math.max(x(end) - x(start), 0.7);
      pen.fillStyle = data.kinds[op][0]; pen.fillRect(x(start), y + GAP, width - (width > 3 ? 0.6 : 0), LANE - 2 * GAP);
    }
    pen.restore();
  }
  function view(a, b) {
    const least = Math.max(phase.length / 1e5, 100), span = Math.min(Math.max(b - a, least), phase.length);
    from = Math.min(Math.max(a, 0), phase.length - span); to = from + span; draw();
  }
  const zoom = (center, factor) => view(center - (center - from) * factor, center + (to - center) * factor);
  canvas.addEventListener("wheel", e => { e.preventDefault();
    zoom(at(e.offsetX), Math.exp(e.deltaY * 0.0015)); }, {passive: false});
  canvas.addEventListener("pointerdown", e => { drag = [e.offsetX, from, to]; canvas.setPointerCapture(e.pointerId); });
  canvas.addEventListener("pointerup", () => { drag = null; });
  canvas.addEventListener("dblclick", () => view(0, phase.length));
  canvas.addEventListener("pointerleave", () => { tip.style.display = "none"; });
  canvas.addEventListener("keydown", e => { const span = to - from, middle = (from + to) / 2;
    if (e.key === "ArrowLeft") view(from - span / 5, to - span / 5);
    else if (e.key === "ArrowRight") view(from + span / 5, to + span / 5);
    else if (e.key === "+" || e.key === "=") zoom(middle, 0.7);
    else if (e.key === "-") zoom(middle, 1.4); else return; e.preventDefault(); });
  canvas.addEventListener("pointermove", e => {
    if (drag) { const shift = (drag[0] - e.offsetX) / (canvas.clientWidth - LEFT) * (drag[2] - drag[1]);
      view(drag[1] + shift, drag[2] + shift); return; }
    const t = at(e.offsetX), lane = Math.floor((e.offsetY - TOP) / LANE);
    const found = e.offsetX < LEFT ? null : phase.bars.find(b => b[0] === lane && b[2] <= t && t <= b[4]);
    tip.style.display = found ? "block" : "none"; if (!found) return;
    const wait = found[3] - found[2], label = found[1] < 0 ? "gate between stages" : data.kinds[found[1]][1];
    const [rank, worker] = data.lanes[lane];
    tip.textContent = "rank " + rank + "  " + worker + "\\n" + label + "\\n" +
      found[6] + "\\nfrom " + time(found[3]) + ", took " + time(found[4] - found[3]) +
      (wait > 0 ? "\\nwaited " + time(wait) + (found[5] ? " for peers" : "") : "");
    tip.style.left = Math.min(e.clientX + 14, window.innerWidth - tip.offsetWidth - 8) + "px";
    tip.style.top = e.clientY + 16 + "px";
  });
  window.addEventListener("resize", draw); draw();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
}
</script></body></html>
"""
