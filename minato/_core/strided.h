/* Copies between two arrays of equal shape, whose strides are not negative. The arrays must not overlap.
 *
 * Axes are added from the outermost to the innermost; neighbours that are one run in both arrays
 * become one axis, so that most copies end as a single memcpy or as a loop of them.
 */
#ifndef MINATO_STRIDED_H
#define MINATO_STRIDED_H

#include <stddef.h>
#include <string.h>

#define MN_MAX_AXES 64
#define MN_LINE_BYTES 64
#define MN_TILE_ITEMS 16   /* with one line of 64 bytes each, a tile is 1 KiB */
#define MN_STRETCH_ITEMS 128 /* 128 lines of 64 bytes are a quarter of the smallest L1 cache */

typedef struct {
    ptrdiff_t size;
    ptrdiff_t dst; /* strides in bytes */
    ptrdiff_t src;
} mn_axis;

typedef struct {
    ptrdiff_t item; /* bytes moved at once */
    int num_axes;
    mn_axis axis[MN_MAX_AXES];
} mn_nest;

static inline void mn_nest_start(mn_nest *nest, ptrdiff_t item) {
    nest->item = item;
    nest->num_axes = 0;
}

static inline void mn_nest_add(mn_nest *nest, ptrdiff_t size, ptrdiff_t dst, ptrdiff_t src) {
    if (size == 1) return;
    if (nest->num_axes > 0) {
        mn_axis *outer = &nest->axis[nest->num_axes - 1];
        if (outer->dst == size * dst && outer->src == size * src) {
            *outer = (mn_axis){outer->size * size, dst, src};
            return;
        }
    }
    nest->axis[nest->num_axes++] = (mn_axis){size, dst, src};
}

/* memcpy of a constant size is one move, whatever the alignment. Left alone, gcc makes of this loop
 * one of half or of full speed, as chance has it; unrolled, it is always fast. */
#define MN_COPY_LINE(ITEM) \
    _Pragma("GCC unroll 4") for (; n > 0; n--, dst += dst_step, src += src_step) \
        memcpy(dst, src, ITEM)

static inline void mn_copy_line(char *dst, ptrdiff_t dst_step, const char *src, ptrdiff_t src_step,
                                ptrdiff_t n, ptrdiff_t item) {
    switch (item) { /* 3, 6 and 12 are three of four channels */
    case 1: MN_COPY_LINE(1); break;
    case 2: MN_COPY_LINE(2); break;
    case 3: MN_COPY_LINE(3); break;
    case 4: MN_COPY_LINE(4); break;
    case 6: MN_COPY_LINE(6); break;
    case 8: MN_COPY_LINE(8); break;
    case 12: MN_COPY_LINE(12); break;
    case 16: MN_COPY_LINE(16); break;
    default: MN_COPY_LINE((size_t)item);
    }
}

/* A plane whose source is densest along `outer`, its destination along `inner`. */
static inline void mn_copy_plane(char *dst, const char *src, mn_axis outer, mn_axis inner,
                                 ptrdiff_t item) {
    ptrdiff_t rows = MN_LINE_BYTES / item;
    if (outer.src == item && rows > 1 && outer.size >= rows && inner.size >= rows) {
        /* Through a tile, lines of cache are read and written whole. Without it, strides of a power
         * of two throw them out of the cache before they are used up (5 times slower). */
        char tile[MN_TILE_ITEMS * MN_LINE_BYTES];
        for (ptrdiff_t i = 0; i < outer.size; i += rows) {
            ptrdiff_t height = outer.size - i < rows ? outer.size - i : rows;
            for (ptrdiff_t j = 0; j < inner.size; j += MN_TILE_ITEMS) {
                ptrdiff_t width = inner.size - j < MN_TILE_ITEMS ? inner.size - j : MN_TILE_ITEMS;
                for (ptrdiff_t k = 0; k < width; k++)
                    memcpy(tile + k * MN_LINE_BYTES, src + i * item + (j + k) * inner.src,
                           (size_t)(height * item));
                for (ptrdiff_t k = 0; k < height; k++)
                    mn_copy_line(dst + (i + k) * outer.dst + j * inner.dst, inner.dst,
                                 tile + k * item, MN_LINE_BYTES, width, item);
            }
        }
        return;
    }
    if (outer.size > inner.size) { /* long lines cost less */
        mn_axis swap = outer;
        outer = inner;
        inner = swap;
    }
    for (ptrdiff_t j = 0; j < inner.size; j += MN_STRETCH_ITEMS) {
        ptrdiff_t width = inner.size - j < MN_STRETCH_ITEMS ? inner.size - j : MN_STRETCH_ITEMS;
        for (ptrdiff_t i = 0; i < outer.size; i++)
            mn_copy_line(dst + i * outer.dst + j * inner.dst, inner.dst,
                         src + i * outer.src + j * inner.src, inner.src, width, item);
    }
}

static void mn_nest_walk(const mn_nest *nest, int depth, char *dst, const char *src) {
    const mn_axis *axis = &nest->axis[depth];
    if (depth == nest->num_axes - 1) {
        mn_copy_line(dst, axis->dst, src, axis->src, axis->size, nest->item);
    } else if (depth == nest->num_axes - 2 && axis->src < axis[1].src) {
        mn_copy_plane(dst, src, axis[0], axis[1], nest->item);
    } else {
        for (ptrdiff_t i = 0; i < axis->size; i++)
            mn_nest_walk(nest, depth + 1, dst + i * axis->dst, src + i * axis->src);
    }
}

/* Copy everything; no axis may have size 0. */
static inline void mn_nest_run(mn_nest *nest, char *dst, const char *src) {
    int last = nest->num_axes - 1;
    if (last >= 0 && nest->axis[last].dst == nest->item && nest->axis[last].src == nest->item) {
        nest->item *= nest->axis[last].size; /* a run of bytes is the item from here on */
        nest->num_axes = last--;
    }
    if (last < 0) {
        memcpy(dst, src, (size_t)nest->item);
        return;
    }
    /* Next to the innermost axis goes the one along which the source is densest. */
    int dense = last;
    for (int i = 0; i < last; i++)
        if (nest->axis[i].src < nest->axis[dense].src) dense = i;
    if (dense < last - 1) {
        mn_axis axis = nest->axis[dense];
        memmove(&nest->axis[dense], &nest->axis[dense + 1],
                (size_t)(last - 1 - dense) * sizeof axis);
        nest->axis[last - 1] = axis;
    }
    mn_nest_walk(nest, 0, dst, src);
}

#endif
