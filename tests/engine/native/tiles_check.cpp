// Runs single tile instructions. A CPU without AMX refuses them by a signal, and the handler here computes what AMX would have
// computed, one element at a time, from the instruction's bytes. So the instructions themselves are tested on every CPU: their
// registers, addresses, strides, and shapes. The handler shares no code with the emulation of tiles.h.
#include <signal.h>
#include <ucontext.h>

#include <atomic>
#include <cmath>
#include <cstring>

#define PDSERVE_AMX
#include "tiles.h"

namespace {

struct Tile {
    uint8_t byte[16][64];
    int rows, row_bytes;
};

thread_local Tile tiles[8];
thread_local bool configured;
std::atomic<long> counts[6];
bool counting;  // and not computing
struct sigaction before;

float flushed(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x; }

float float_of(uint16_t half) {
    const uint32_t bits = uint32_t(half) << 16;
    float x;
    std::memcpy(&x, &bits, 4);
    return flushed(x);
}

void add_products(Tile& sum, const Tile& x, const Tile& w) {
    for (int row = 0; row < sum.rows; row++)
        for (int column = 0; column < sum.row_bytes / 4; column++) {
            float chain[2] = {0, 0};
            for (int k = 0; k < x.row_bytes / 4; k++)
                for (int odd = 0; odd < 2; odd++) {
                    uint16_t a, b;
                    std::memcpy(&a, &x.byte[row][k * 4 + odd * 2], 2), std::memcpy(&b, &w.byte[k][column * 4 + odd * 2], 2);
                    chain[odd] = flushed(std::fma(float_of(a), float_of(b), chain[odd]));
                }
            float old;
            std::memcpy(&old, &sum.byte[row][column * 4], 4);
            const float total = flushed(flushed(old) + flushed(chain[0] + chain[1]));
            std::memcpy(&sum.byte[row][column * 4], &total, 4);
        }
}

void add_bytes(Tile& sum, const Tile& x, const Tile& w, bool x_signed, bool w_signed) {
    for (int row = 0; row < sum.rows; row++)
        for (int column = 0; column < sum.row_bytes / 4; column++) {
            uint32_t total;
            std::memcpy(&total, &sum.byte[row][column * 4], 4);
            for (int k = 0; k < x.row_bytes; k++) {
                const uint8_t a = x.byte[row][k], b = w.byte[k / 4][column * 4 + k % 4];
                total += uint32_t((x_signed ? int(int8_t(a)) : int(a)) * (w_signed ? int(int8_t(b)) : int(b)));
            }
            std::memcpy(&sum.byte[row][column * 4], &total, 4);
        }
}

// Computes the instruction at `code`. Returns its length, or 0 when it is none of AMX, or one that AMX would refuse.
int compute(const uint8_t* code, const greg_t* registers) {
    if (code[0] != 0xC4) return 0;
    static const int order[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
    const int high_index = code[1] & 0x40 ? 0 : 8, high_base = code[1] & 0x20 ? 0 : 8, prefix = code[2] & 3;
    if ((code[1] & 0x1F) != 2 || code[2] & 0x84) return 0;  // map 0F38, 128 bits, W0
    const int opcode = code[3], mode = code[4] >> 6, reg = code[4] >> 3 & 7, rm = code[4] & 7, third = ~(code[2] >> 3) & 7;
    int length = 5;
    const auto address = [&](long& stride) {
        long base, offset = 0;
        stride = 0;
        if (rm == 4) {
            const uint8_t sib = code[length++];
            const int index = (sib >> 3 & 7) + high_index;
            base = registers[order[(sib & 7) + high_base]];
            if (index != 4) stride = registers[order[index]] << (sib >> 6);
        } else {
            base = registers[order[rm + high_base]];
        }
        if (mode == 1) offset = int8_t(code[length]), length += 1;
        if (mode == 2) std::memcpy(&offset, code + length, 4), offset = int32_t(offset), length += 4;
        return (uint8_t*)(base + offset);
    };
    long stride;
    if (opcode == 0x49 && prefix == 0 && mode != 3) {
        const uint8_t* from = address(stride);
        if (from[0] != 1 || from[1] != 0) return 0;
        for (int i = 0; i < 8; i++) {
            tiles[i].rows = from[48 + i], tiles[i].row_bytes = from[16 + 2 * i] + 256 * from[17 + 2 * i];
            if (tiles[i].rows < 1 || tiles[i].rows > 16 || tiles[i].row_bytes < 1 || tiles[i].row_bytes > 64) return 0;
            std::memset(tiles[i].byte, 0, sizeof tiles[i].byte);
        }
        return configured = true, counts[0]++, length;
    }
    if (opcode == 0x49 && prefix == 0 && code[4] == 0xC0) return configured = false, length;
    if (!configured) return 0;
    if (opcode == 0x49 && prefix == 3 && mode == 3) return std::memset(tiles[reg].byte, 0, sizeof tiles[reg].byte), counts[1]++, length;
    if (opcode == 0x4B && (prefix == 3 || prefix == 2) && mode != 3 && rm == 4) {
        uint8_t* at = address(stride);
        if (counting) return counts[prefix == 3 ? 2 : 3]++, length;
        Tile& tile = tiles[reg];
        for (int row = 0; row < tile.rows; row++) {
            if (prefix == 3) {
                std::memset(tile.byte[row], 0, 64);
                std::memcpy(tile.byte[row], at + row * stride, tile.row_bytes);
            } else {
                std::memcpy(at + row * stride, tile.byte[row], tile.row_bytes);
            }
        }
        return counts[prefix == 3 ? 2 : 3]++, length;
    }
    Tile &sum = tiles[reg], &x = tiles[rm], &w = tiles[third];
    if ((opcode != 0x5C && opcode != 0x5E) || mode != 3 || &sum == &x || &sum == &w || &x == &w) return 0;
    if (x.row_bytes != 4 * w.rows || x.rows != sum.rows || w.row_bytes != sum.row_bytes) return 0;
    if (counting) return counts[opcode == 0x5C ? 4 : 5]++, length;
    if (opcode == 0x5C && prefix == 2) return add_products(sum, x, w), counts[4]++, length;
    if (opcode == 0x5E) return add_bytes(sum, x, w, prefix >= 2, prefix == 1 ? true : prefix == 3), counts[5]++, length;
    return 0;
}

void handle(int number, siginfo_t* info, void* context) {
    greg_t* registers = ((ucontext_t*)context)->uc_mcontext.gregs;
    const int length = compute((const uint8_t*)registers[REG_RIP], registers);
    if (length > 0) {
        registers[REG_RIP] += length;
        return;
    }
    sigaction(number, &before, nullptr);  // it happens again, and is handled as before
}

// Computes one instruction with tiles of the shape that is wanted, without tiles.h.
void run_alone(int op, int rows, int columns, int words, const uint8_t* a, const uint8_t* b, const uint8_t* c, uint8_t* to) {
    alignas(64) uint8_t shape[64] = {1};
    const int bytes[] = {4 * columns, 4 * words, 4 * columns}, lines[] = {rows, rows, words};
    for (int i = 0; i < 8; i++) shape[16 + 2 * i] = uint8_t(bytes[i % 3]), shape[48 + i] = uint8_t(lines[i % 3]);
    asm volatile("ldtilecfg %0" : : "m"(shape));
    asm volatile("tileloadd (%0,%3,1), %%tmm0\n tileloadd (%1,%3,1), %%tmm1\n tileloadd (%2,%3,1), %%tmm2"
                 : : "r"(c), "r"(a), "r"(b), "r"(64L) : "memory");
    if (op == 0) asm volatile("tdpbf16ps %tmm2, %tmm1, %tmm0");
    if (op == 1) asm volatile("tdpbssd %tmm2, %tmm1, %tmm0");
    if (op == 2) asm volatile("tdpbsud %tmm2, %tmm1, %tmm0");
    if (op == 3) asm volatile("tdpbusd %tmm2, %tmm1, %tmm0");
    if (op == 4) asm volatile("tdpbuud %tmm2, %tmm1, %tmm0");
    asm volatile("tilestored %%tmm0, (%0,%1,1)" : : "r"(to), "r"(64L) : "memory");
    asm volatile("tilerelease");
}

template <class Tiles>
void run(int op, int rows, const uint8_t* a, const uint8_t* b, const uint8_t* c, uint8_t* to) {
    const pdserve::Flush flush;
    Tiles::forget();
    Tiles::hold(rows);
    Tiles::template load<2>(c, 64), Tiles::template load<5>(a, 64), Tiles::template load<7>(b, 64);
    if (op == 0)
        Tiles::template add<2, 5, 7>();
    else
        Tiles::template add_bytes<2, 5, 7>();
    Tiles::template store<2>(to, 64);
    Tiles::release();
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// Computes AMX's instructions where the CPU refuses them, or counts them only, until `tiles_untrap`, which writes how many of each were computed so:
// configurations, zeros, loads, stores, products of bfloat16, products of bytes.
void tiles_trap(int only_count) {
    counting = only_count;
    struct sigaction ours = {};
    ours.sa_sigaction = handle, ours.sa_flags = SA_SIGINFO | SA_NODEFER;
    sigaction(SIGILL, &ours, &before);
    for (auto& count : counts) count = 0;
}

void tiles_untrap(long* to) {
    sigaction(SIGILL, &before, nullptr);
    for (int i = 0; i < 6; i++) to[i] = counts[i];
}

int tiles_permitted(void) { return pdserve::tiles_are_permitted(); }

// a, b, c, to: [16, 64 bytes]. op: products of bfloat16, or of bytes: 1 both signed, 2 x signed, 3 weights signed, 4 both unsigned.
void tiles_alone(int op, int rows, int columns, int words, const uint8_t* a, const uint8_t* b, const uint8_t* c, uint8_t* to) {
    run_alone(op, rows, columns, words, a, b, c, to);
}

// The same by tiles.h, with whole columns and words. op: 0 or 2.
void tiles_run(int emulated, int op, int rows, const uint8_t* a, const uint8_t* b, const uint8_t* c, uint8_t* to) {
    emulated ? run<pdserve::EmulatedTiles>(op, rows, a, b, c, to) : run<pdserve::HardwareTiles>(op, rows, a, b, c, to);
}
}
#pragma GCC visibility pop
