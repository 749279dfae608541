// Checksums of KV blocks; engine/kv/checksum.py defines them. Vectors of any width give the same bits, so the widest vectors of
// this CPU are used. The code runs on any x86-64, and in plain C++ elsewhere.
#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#include <immintrin.h>
#define PDSERVE_VECTORS 1
#endif

namespace {

constexpr long kWords = 512;  // words of a stripe
constexpr uint64_t kGolden = 0x9E3779B97F4A7C15u;

constexpr uint64_t mix(uint64_t word) {
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9u;
    word = (word ^ (word >> 27)) * 0x94D049BB133111EBu;
    return word ^ (word >> 31);
}

struct Keys {
    alignas(64) uint64_t at[kWords];
    constexpr Keys() : at() {
        for (long i = 0; i < kWords; i++) at[i] = mix(uint64_t(i + 1) * kGolden) | 1;
    }
};
constexpr Keys kKeys;

inline uint64_t term(uint64_t word, uint64_t key) {
    const uint64_t keyed = word ^ key;
    return ((word >> 32) | (word << 32)) + uint64_t(uint32_t(keyed)) * (keyed >> 32);
}

// Returns the sum S of `bytes` bytes of a stripe, from word `begin` on.
inline uint64_t plain(const uint8_t* data, long bytes, long begin = 0) {
    uint64_t sum = 0;
    for (long i = begin; i * 8 < bytes; i++) {
        uint64_t word = 0;
        std::memcpy(&word, data + i * 8, bytes - i * 8 < 8 ? bytes - i * 8 : 8);
        sum += term(word, kKeys.at[i]);
    }
    return sum;
}

using Stripe = uint64_t (*)(const uint8_t* data, long bytes);

inline uint64_t stripe_plain(const uint8_t* data, long bytes) { return plain(data, bytes); }

#ifdef PDSERVE_VECTORS
// Bytes between what is summed and what is prefetched. Without it, stripes of 512 bytes come from memory at three quarters of
// the rate (Zen 5): what ends a stripe holds up the loads of the next one. 1 KiB was slower. A prefetch past the end of the
// memory does no harm.
constexpr long kAhead = 2048;

inline void fetch(const uint8_t* data) { _mm_prefetch((const char*)data, _MM_HINT_T0); }

__attribute__((target("avx2"))) inline uint64_t stripe_avx2(const uint8_t* data, long bytes) {
    __m256i sum0 = _mm256_setzero_si256(), sum1 = sum0;
    long i = 0;
    for (; (i + 8) * 8 <= bytes; i += 8) {
        fetch(data + i * 8 + kAhead);
        const __m256i a = _mm256_loadu_si256((const __m256i*)(data + i * 8)), b = _mm256_loadu_si256((const __m256i*)(data + i * 8 + 32));
        const __m256i x = _mm256_xor_si256(a, _mm256_load_si256((const __m256i*)(kKeys.at + i)));
        const __m256i y = _mm256_xor_si256(b, _mm256_load_si256((const __m256i*)(kKeys.at + i + 4)));
        sum0 = _mm256_add_epi64(sum0, _mm256_add_epi64(_mm256_shuffle_epi32(a, 0xB1), _mm256_mul_epu32(x, _mm256_srli_epi64(x, 32))));
        sum1 = _mm256_add_epi64(sum1, _mm256_add_epi64(_mm256_shuffle_epi32(b, 0xB1), _mm256_mul_epu32(y, _mm256_srli_epi64(y, 32))));
    }
    alignas(32) uint64_t lanes[4];
    _mm256_store_si256((__m256i*)lanes, _mm256_add_epi64(sum0, sum1));
    return lanes[0] + lanes[1] + lanes[2] + lanes[3] + plain(data, bytes, i);
}

__attribute__((target("avx512f"))) inline uint64_t stripe_avx512(const uint8_t* data, long bytes) {
    __m512i sum0 = _mm512_setzero_si512(), sum1 = sum0;
    long i = 0;
    for (; (i + 16) * 8 <= bytes; i += 16) {
        fetch(data + i * 8 + kAhead);
        fetch(data + i * 8 + kAhead + 64);
        const __m512i a = _mm512_loadu_si512(data + i * 8), b = _mm512_loadu_si512(data + i * 8 + 64);
        const __m512i x = _mm512_xor_si512(a, _mm512_load_si512(kKeys.at + i)), y = _mm512_xor_si512(b, _mm512_load_si512(kKeys.at + i + 8));
        sum0 = _mm512_add_epi64(sum0, _mm512_add_epi64(_mm512_rol_epi64(a, 32), _mm512_mul_epu32(x, _mm512_srli_epi64(x, 32))));
        sum1 = _mm512_add_epi64(sum1, _mm512_add_epi64(_mm512_rol_epi64(b, 32), _mm512_mul_epu32(y, _mm512_srli_epi64(y, 32))));
    }
    return uint64_t(_mm512_reduce_add_epi64(_mm512_add_epi64(sum0, sum1))) + plain(data, bytes, i);
}
#endif

// The stripes of every block: offset from the beginning of the block, size in bytes, and what is added before `mix`.
struct Table {
    const int64_t *offsets, *sizes;
    const uint64_t* keys;
    int64_t count;
};

// Returns the checksum of a block. It is inlined, so that each way has a loop of its own without calls.
template <Stripe stripe>
[[gnu::always_inline]] inline uint64_t block_sum(const uint8_t* block, const Table& table) {
    uint64_t total = 0;
    for (int64_t i = 0; i < table.count; i++) {
        const uint8_t* data = block + table.offsets[i];
        if (table.sizes[i] == 4) {  // a scale
            uint32_t half;
            std::memcpy(&half, data, 4);
            total += mix(term(half, kKeys.at[0]) + table.keys[i]);
        } else {
            total += mix(stripe(data, table.sizes[i]) + table.keys[i]);
        }
    }
    return total;
}

using Block = uint64_t (*)(const uint8_t* block, const Table& table);

uint64_t block_plain(const uint8_t* block, const Table& table) { return block_sum<stripe_plain>(block, table); }

#ifdef PDSERVE_VECTORS
__attribute__((target("avx2"))) uint64_t block_avx2(const uint8_t* block, const Table& table) { return block_sum<stripe_avx2>(block, table); }

__attribute__((target("avx512f"))) uint64_t block_avx512(const uint8_t* block, const Table& table) {
    return block_sum<stripe_avx512>(block, table);
}
#endif

// Returns the function for a way: 0 the best, 1 plain, 2 AVX2, 3 AVX-512. Null when this CPU lacks it.
Block block_by(int way) {
#ifdef PDSERVE_VECTORS
    if ((way == 0 || way == 3) && __builtin_cpu_supports("avx512f")) return block_avx512;
    if ((way == 0 || way == 2) && __builtin_cpu_supports("avx2")) return block_avx2;
#endif
    return way <= 1 ? block_plain : nullptr;
}

}  // namespace

// Writes the checksum of block ids[i] to sums[i]; block b begins at blocks + b * block_bytes. offsets, sizes and keys are the table
// of `stripes` stripes, of 1 to 4,096 bytes each. Any number of threads may call it.
// Returns 0, and writes nothing, when this CPU lacks `way`; otherwise 1.
extern "C" int pdserve_stripe_sums(const uint8_t* blocks, int64_t block_bytes, const int64_t* ids, int64_t count, const int64_t* offsets,
                                   const int64_t* sizes, const uint64_t* keys, int64_t stripes, uint64_t* sums, int way) {
    const Block block_sum = block_by(way);
    if (block_sum == nullptr) return 0;
    const Table table{offsets, sizes, keys, stripes};
    for (int64_t i = 0; i < count; i++) sums[i] = block_sum(blocks + ids[i] * block_bytes, table);
    return 1;
}
