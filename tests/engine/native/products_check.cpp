// Multiplies rows with a weight, as the model does.
#include "model.h"

using namespace pdserve;

#pragma GCC visibility push(default)
extern "C" {

// Computes x [rows, k] times w [n, k], both bfloat16, with `parts` parts: [rows, n]. Only rows [first, rows) are multiplied, together.
void multiply_rows(int emulated, int bits, long parts, long first, long rows, long n, long k, const bf16* x, const bf16* w, float* to) {
    const Flush flush;
    Arena arena;
    const Weight weight = packed(arena, {w, n, k, 0, k}, bits, parts);
    RowRoom room;
    room.fit(rows, weight.words, bits == 8);
    Lines<float> spare(k), sums(rows * k / kGroup4 + 1);
    Lines<uint32_t> codes(k / 2 * kPanel);
    Rows all = room.view(weight);
    for (long row = 0; row < rows; row++) requantise(x + row * k, k, spare.data(), all, row);
    if (bits == 4) sum_groups(all, rows, weight.words, sums.data()), all.sums = sums.data(), all.codes = codes.data();
#ifdef PDSERVE_AMX
    tiles_are_emulated = emulated;
    const TileUse use;
#endif
    multiply(rows_from(all, first), rows - first, weight, 0, weight.count(), Store{to + first * n, n});
}
}
#pragma GCC visibility pop
