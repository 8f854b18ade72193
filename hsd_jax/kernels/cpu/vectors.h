// Vectors, and what is computed with them, that the CPU kernels share. The least that they need is AVX2 with FMA.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>

#include <immintrin.h>

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#else
constexpr int kLanes = 8;
#endif
typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Word __attribute__((vector_size(kLanes * 4)));
typedef int32_t Int __attribute__((vector_size(kLanes * 4)));

// Weights are taken two vectors at a time. A pair of bfloat16 lies in one 32-bit word, and a bfloat16 is the upper half
// of a float: the low halves come first, then the high ones, so the rows must stand in that order too (`Pair`).
constexpr int kPair = 2 * kLanes;

// Where the processor multiplies pairs of bfloat16, rows for such weights are rounded to bfloat16 once and lie as they are:
// a product takes 32 numbers of an output where one in float32 takes 16, and no weight is taken apart.
#if defined(__AVX512BF16__)
typedef uint16_t Paired;
#else
typedef float Paired;
#endif

// Numbers from the start of a cache line on. A vector that lies in two lines is loaded twice, and 8 rows of 1,408 numbers
// took 1.4 times as long.
class Aligned {
 public:
  explicit Aligned(int64_t n) : all_(new float[n + 16]) {}
  float* data() {
    auto at = reinterpret_cast<uintptr_t>(all_.get());
    return all_.get() + (-at % 64) / sizeof(float);
  }

 private:
  std::unique_ptr<float[]> all_;
};

// A vector that may lie anywhere. Copied byte by byte (`memcpy`), GCC 12 put some through the stack on their way.
static inline Vec Load(const float* p) {
  typedef Vec __attribute__((aligned(4), may_alias)) Lying;
  return *reinterpret_cast<const Lying*>(p);
}
// x in every lane. To add it to zeros is an operation more, for the compiler may not leave out +0: it changes -0.
static inline Vec All(float x) { return x - Vec{}; }
static inline Vec First(const float* p) { return Load(p); }
static inline Vec Second(const float* p) { return Load(p + kLanes); }
static inline Word Words(const uint16_t* p) {
  typedef Word __attribute__((aligned(2), may_alias)) Lying;
  return *reinterpret_cast<const Lying*>(p);
}
static inline Vec First(const uint16_t* p) { return (Vec)(Words(p) << 16); }
static inline Vec Second(const uint16_t* p) { return (Vec)(Words(p) & 0xffff0000u); }
static inline Vec First(const int8_t* p) {
#if defined(__AVX512F__)
  return (Vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#else
  return (Vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#endif
}
static inline Vec Second(const int8_t* p) { return First(p + kLanes); }
// A row of k numbers in the order and the type that weights in bfloat16 want.
#if defined(__AVX512BF16__)
static inline uint16_t Rounded(float x) {
  return uint16_t(_mm_cvtsi128_si32((__m128i)_mm_cvtneps_pbh(_mm_set_ss(x))));
}
[[maybe_unused]] static void Pair(const float* x, int64_t k, uint16_t* out) {
  int64_t i = 0;
  for (; i + kPair <= k; i += kPair) {
    __m512bh both = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(x + i + kLanes), _mm512_loadu_ps(x + i));
    std::memcpy(out + i, &both, sizeof(both));
  }
  for (; i < k; i++) out[i] = Rounded(x[i]);
}
#else
[[maybe_unused]] static void Pair(const float* x, int64_t k, float* out) {
  int64_t i = 0;
  for (; i + kPair <= k; i += kPair) {
#if defined(__AVX512F__)
    const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    __m512 low = _mm512_loadu_ps(x + i), high = _mm512_loadu_ps(x + i + kLanes);
    _mm512_storeu_ps(out + i, _mm512_permutex2var_ps(low, even, high));
    _mm512_storeu_ps(out + i + kLanes, _mm512_permutex2var_ps(low, odd, high));
#else
    for (int j = 0; j < kLanes; j++) out[i + j] = x[i + 2 * j], out[i + kLanes + j] = x[i + 2 * j + 1];
#endif
  }
  for (; i < k; i++) out[i] = x[i];
}
#endif

// Keeps a value in a register; the compiler would rather load it again for every product.
static inline void Hold(Vec& v) { asm("" : "+v"(v)); }
// a * b + c, rounded once. Left to itself the compiler fuses here and not there, and the bits of a row would depend on
// the tile it falls into.
static inline Vec MulAdd(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
  return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#endif
}
static inline float MulAdd(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
static inline float Scalar(float v) { return v; }
static inline float Scalar(int8_t v) { return v; }
static inline float Scalar(uint16_t v) {
  uint32_t bits = uint32_t(v) << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

// exp(x) for x <= 0; 0 below -87. Relative error under 2e-7 (Cephes). Every fused operation is spelled out: the
// compiler's own choice may differ from one place it is inlined to the next.
static inline Vec Exp(Vec x) {
  const Vec zero = {}, lowest = zero - 87.0f;
  Int tiny = x < lowest;
  x = (Vec)(((Int)x & ~tiny) | ((Int)lowest & tiny));
  Vec shifted = MulAdd(x, zero + 1.44269504f, zero - 0.5f);
  Int power = __builtin_convertvector(shifted, Int);  // toward zero: the nearest whole number, since x <= 0
  Vec whole = __builtin_convertvector(power, Vec);
  x = MulAdd(whole, zero - 0.693359375f, x);
  x = MulAdd(whole, zero + 2.12194440e-4f, x);
  Vec y = zero + 1.9875691500e-4f;
  y = MulAdd(y, x, zero + 1.3981999507e-3f);
  y = MulAdd(y, x, zero + 8.3334519073e-3f);
  y = MulAdd(y, x, zero + 4.1665795894e-2f);
  y = MulAdd(y, x, zero + 1.6666665459e-1f);
  y = MulAdd(y, x, zero + 5.0000001201e-1f);
  y = MulAdd(y, x * x, x) + 1.0f;
  Int bits = (Int)y + power * (1 << 23);
  return (Vec)(bits & ~tiny);
}

// The sums of eight accumulators, together: one at a time they cost as much as the products of a short K. Of each, the
// upper half is added to the lower one, then neighbours, then neighbours of these, and then the two that are left.
#if defined(__AVX512F__)
// The halves of a, added, and those of b.
static inline __m512 Halves(Vec a, Vec b) {
  __m512 x = (__m512)a, y = (__m512)b;
  return _mm512_add_ps(_mm512_shuffle_f32x4(x, y, 0x44), _mm512_shuffle_f32x4(x, y, 0xee));
}
// The neighbours of a, added, and those of b, by quarters. `vhaddps` knows only half of the registers.
static inline __m512 Neighbours(__m512 a, __m512 b) {
  return _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd));
}
static inline void Sum8(Vec a, Vec b, Vec c, Vec d, Vec e, Vec f, Vec g, Vec h, float* out) {
  __m512 two = Neighbours(Neighbours(Halves(a, e), Halves(b, f)), Neighbours(Halves(c, g), Halves(d, h)));
  __m512 sums = _mm512_add_ps(_mm512_shuffle_f32x4(two, two, 0x08), _mm512_shuffle_f32x4(two, two, 0x0d));
  _mm256_storeu_ps(out, _mm512_castps512_ps256(sums));
}
#else
static inline void Sum4(Vec a, Vec b, Vec c, Vec d, float* out) {
  __m256 s = _mm256_hadd_ps(_mm256_hadd_ps((__m256)a, (__m256)b), _mm256_hadd_ps((__m256)c, (__m256)d));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1)));
}
static inline void Sum8(Vec a, Vec b, Vec c, Vec d, Vec e, Vec f, Vec g, Vec h, float* out) {
  Sum4(a, b, c, d, out), Sum4(e, f, g, h, out + 4);
}
#endif

// How far ahead of its use a weight is fetched into the second-level cache, in bytes, of all streams of a tile together.
// Each output of a tile is the next of a stream of its own, so what lies behind it in memory is what its stream reads
// next. Outputs that lie side by side are read in turns, which the processor's own prefetching does not follow: fetching
// the tile after next by hand took 1.1 to 1.2 times as long. On two cores of a Zen 4
// 8 rows then read 33 GB/s, and 25 with a fetch into the first-level cache: the next weights push the rows out of it.
constexpr int kAhead = 8192;
// Spelled out, because GCC 12 drops calls of functions that do no more than `__builtin_prefetch`.
template <int kO>
static inline void Fetch(const void* weight) {
  asm volatile("prefetcht1 %0" : : "m"(static_cast<const char*>(weight)[kAhead / kO]));
}

// Rows that go through the weights together: more of them would not stay in the second-level cache.
constexpr int64_t kRowsAtOnce = 64;
// Tiles of a stream that all rows go through before the next: their weights stay in a near cache meanwhile.
constexpr int kTilesAtOnce = 4;
// Runs tile(streams, rows, b, a, apart) for rows [from, from + n) and `count` units behind unit `first`, each the next of one
// of kO streams that are `apart` from one another. The first `larger` blocks of rows have kN of them, the others one less.
template <int kO, int kN, typename RunTile>
static inline void Streams(int64_t from, int64_t n, int64_t larger, int64_t first, int64_t count, RunTile tile) {
  constexpr std::integral_constant<int, kO> streams;
  const int64_t apart = count / kO;
  for (int64_t begin = 0; begin < apart; begin += kTilesAtOnce) {
    int64_t end = std::min<int64_t>(begin + kTilesAtOnce, apart);
    for (int64_t b = 0; b < n;) {
      bool is_larger = b < larger * kN;
      for (int64_t a = begin; a < end; a++) {
        if (is_larger)
          tile(streams, std::integral_constant<int, kN>(), from + b, first + a, apart);
        else if constexpr (kN > 1)
          tile(streams, std::integral_constant<int, kN - 1>(), from + b, first + a, apart);
      }
      b += is_larger ? kN : kN - 1;
    }
  }
}

// The same for `blocks` blocks of at most Shape::kRows rows: as many streams as a tile has, and the few units left one by
// one.
template <typename Shape, int kN, typename RunTile>
static void Blocks(int64_t from, int64_t n, int64_t blocks, int64_t units, RunTile tile) {
  if constexpr (kN < Shape::kRows)
    if (n > kN * blocks) return Blocks<Shape, kN + 1>(from, n, blocks, units, tile);
  constexpr int kO = Shape::template kStreams<kN>;
  int64_t larger = n - blocks * (kN - 1), left = units % kO;
  Streams<kO, kN>(from, n, larger, 0, units - left, tile);
  Streams<1, kN>(from, n, larger, units - left, left, tile);
}

// The same for any number of rows.
template <typename Shape, typename RunTile>
static void AllTiles(int64_t n, int64_t units, RunTile tile) {
  for (int64_t from = 0; from < n; from += kRowsAtOnce) {
    int64_t some = std::min(n - from, kRowsAtOnce);
    Blocks<Shape, 1>(from, some, (some + Shape::kRows - 1) / Shape::kRows, units, tile);
  }
}
