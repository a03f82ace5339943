/* Walks the steps of a recorded call: launches, copies, fills, and streams that wait for each other.

   records.py builds the steps and has the same walk in Python, which says what each field means.  This file includes
   nothing of CUDA: the driver's functions come as pointers, and both sides agree on the structs. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { LAUNCH, COPY, FILL, FOLLOW };

typedef struct {
    int32_t (*launch)(const void *config, void *function, void **parameters, void **extra);
    int32_t (*copy)(uint64_t target, uint64_t source, size_t bytes, void *stream);
    int32_t (*fill)(uint64_t target, uint32_t word, size_t words, void *stream);
    int32_t (*record)(void *event, void *stream);
    int32_t (*wait)(void *stream, void *event, uint32_t flags);
    int32_t (*encode)(void *map, uint32_t type, uint32_t rank, void *base, const uint64_t *dims,
                      const uint64_t *strides, const uint32_t *box, const uint32_t *steps, uint32_t interleave,
                      uint32_t swizzle, uint32_t promotion, uint32_t fill);
} Driver;

/* values[slot] + offset; without a slot (-1) the offset alone. */
typedef struct {
    int64_t slot, offset;
} Place;

typedef struct {
    char *where;
    Place place;
    int64_t bytes; /* 4 or 8 */
} Patch;

typedef struct {
    char *where;
    Place place;
    uint64_t encoded; /* the address that is in it now; 0: none */
    uint64_t dims[5], strides[4];
    uint32_t box[5], steps[5];
    uint32_t type, rank, swizzle, promotion;
} Map;

typedef struct {
    int64_t kind;
    Place stream;
    /* LAUNCH */
    char *config; /* CUlaunchConfig */
    void *function;
    void **parameters;
    Patch *patches;
    Map *maps;
    int64_t num_patches, num_maps;
    /* COPY: target, source, size in bytes.  FILL: target, the word in source.offset, size in words.
       FOLLOW: target is the stream that waits until `event` is reached on `stream`. */
    Place target, source;
    int64_t size;
    void *event;
} Step;

enum { STREAM_IN_CONFIG = 32 };

static uint64_t find(Place place, const int64_t *values) {
    return (uint64_t)((place.slot < 0 ? 0 : values[place.slot]) + place.offset);
}

static int32_t run(const Driver *driver, Step *step, const int64_t *values) {
    void *stream = (void *)find(step->stream, values);
    if (step->kind == COPY)
        return driver->copy(find(step->target, values), find(step->source, values), (size_t)step->size, stream);
    if (step->kind == FILL)
        return driver->fill(find(step->target, values), (uint32_t)step->source.offset, (size_t)step->size, stream);
    if (step->kind == FOLLOW) {
        int32_t code = driver->record(step->event, stream);
        return code ? code : driver->wait((void *)find(step->target, values), step->event, 0);
    }
    for (int64_t i = 0; i < step->num_patches; i++) {
        const Patch *patch = step->patches + i;
        uint64_t value = find(patch->place, values);
        memcpy(patch->where, &value, (size_t)patch->bytes); /* little-endian, as GPUs are */
    }
    for (int64_t i = 0; i < step->num_maps; i++) {
        Map *map = step->maps + i;
        uint64_t base = find(map->place, values);
        if (base == map->encoded)
            continue;
        int32_t code = driver->encode(map->where, map->type, map->rank, (void *)base, map->dims, map->strides,
                                      map->box, map->steps, 0, map->swizzle, map->promotion, 0);
        if (code)
            return code;
        map->encoded = base;
    }
    memcpy(step->config + STREAM_IN_CONFIG, &stream, sizeof stream);
    return driver->launch(step->config, step->function, step->parameters, NULL);
}

/* The first step that fails, from `first` on, in the upper half, and its code in the lower one; 0 if none fails. */
uint64_t uniep_walk(const Driver *driver, Step *steps, int64_t first, int64_t count, const int64_t *values) {
    for (int64_t i = first; i < count; i++) {
        int32_t code = run(driver, steps + i, values);
        if (code)
            return (uint64_t)i << 32 | (uint32_t)code;
    }
    return 0;
}
