// What the CPU kernels share: vectors, tiles of a product in registers, work split over XLA's threads.
//
// A sum is added up in an order that depends on the length of the vectors alone: a row's result is the same to the bit
// whatever rows stand beside it.

#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wreturn-type"
#pragma GCC diagnostic ignored "-Wattributes"
#include "xla/ffi/api/ffi.h"
#pragma GCC diagnostic pop

namespace ffi = xla::ffi;

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#else
constexpr int kLanes = 8;
#endif
typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Word __attribute__((vector_size(kLanes * 4)));

// Weights are taken two vectors at a time. A pair of bfloat16 lies in one 32-bit word, and a bfloat16 is the upper half
// of a float: the low halves come first, then the high ones, so the rows must stand in that order too (`Deinterleave`).
constexpr int kPair = 2 * kLanes;

static inline Vec Load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}
static inline Vec First(const float* p) { return Load(p); }
static inline Vec Second(const float* p) { return Load(p + kLanes); }
static inline Word Words(const uint16_t* p) {
  Word words;
  std::memcpy(&words, p, sizeof(words));
  return words;
}
static inline Vec First(const uint16_t* p) { return (Vec)(Words(p) << 16); }
static inline Vec Second(const uint16_t* p) { return (Vec)(Words(p) & 0xffff0000u); }
[[maybe_unused]] static void Deinterleave(const float* x, int64_t n, int64_t k, float* out) {
  for (int64_t b = 0; b < n; b++, x += k, out += k) {
    int64_t i = 0;
    for (; i + kPair <= k; i += kPair)
      for (int j = 0; j < kLanes; j++) out[i + j] = x[i + 2 * j], out[i + kLanes + j] = x[i + 2 * j + 1];
    for (; i < k; i++) out[i] = x[i];
  }
}

// Keeps a value in a register; the compiler would rather load it again for every product.
static inline void Hold(Vec& v) {
#if defined(__x86_64__)
  asm("" : "+x"(v));
#else
  (void)v;
#endif
}
// a * b + c, rounded once. Left to itself the compiler fuses here and not there, and the bits of a row would depend on
// the tile it falls into.
static inline Vec MulAdd(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
  return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}
static inline float MulAdd(float a, float b, float c) {
#if defined(__FMA__)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}
static inline float Scalar(float v) { return v; }
static inline float Scalar(uint16_t v) {
  uint32_t bits = uint32_t(v) << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

// The sums of four accumulators, together: one at a time they cost as much as the products of a short K.
static inline void Sum4(const Vec& a, const Vec& b, const Vec& c, const Vec& d, float* out) {
#if defined(__AVX2__)
  auto half = [](const Vec& v) {
#if defined(__AVX512F__)
    return _mm256_add_ps(_mm512_castps512_ps256((__m512)v), _mm512_extractf32x8_ps((__m512)v, 1));
#else
    return (__m256)v;
#endif
  };
  __m256 s = _mm256_hadd_ps(_mm256_hadd_ps(half(a), half(b)), _mm256_hadd_ps(half(c), half(d)));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1)));
#else
  const Vec* all[4] = {&a, &b, &c, &d};
  for (int j = 0; j < 4; j++) {
    float s[kLanes];
    std::memcpy(s, all[j], sizeof(s));
    for (int width = kLanes / 2; width > 0; width /= 2)
      for (int i = 0; i < width; i++) s[i] += s[i + width];
    out[j] = s[0];
  }
#endif
}

// A tile of kO outputs by kN rows; `next` are weights of a later tile, fetched meanwhile: the memory and the
// multipliers are each busy for about half of the time otherwise.
template <int kO, int kN, typename W>
static inline void Tile(const float* x, const W* w, const W* next, float* y, int64_t k, int64_t o) {
  Vec acc[kO][kN] = {};
  int64_t i = 0;
  for (; i + kPair <= k; i += kPair) {
    Vec xv[kN];
#pragma GCC unroll 8
    for (int a = 0; a < kO; a++) {
      __builtin_prefetch(next + a * k + i);
      if (kPair * sizeof(W) > 64) __builtin_prefetch(next + a * k + i + kLanes);
    }
#pragma GCC unroll 8
    for (int b = 0; b < kN; b++) xv[b] = Load(x + b * k + i), Hold(xv[b]);
#pragma GCC unroll 8
    for (int a = 0; a < kO; a++) {
      Vec wv = First(w + a * k + i);
      Hold(wv);
#pragma GCC unroll 8
      for (int b = 0; b < kN; b++) acc[a][b] = MulAdd(wv, xv[b], acc[a][b]);
    }
#pragma GCC unroll 8
    for (int b = 0; b < kN; b++) xv[b] = Load(x + b * k + i + kLanes), Hold(xv[b]);
#pragma GCC unroll 8
    for (int a = 0; a < kO; a++) {
      Vec wv = Second(w + a * k + i);
      Hold(wv);
#pragma GCC unroll 8
      for (int b = 0; b < kN; b++) acc[a][b] = MulAdd(wv, xv[b], acc[a][b]);
    }
  }
  constexpr int kSums = kO * kN;
  float sums[kSums + 3];
#pragma GCC unroll 8
  for (int c = 0; c < kSums; c += 4) {
    auto at = [&](int j) -> const Vec& { return acc[j < kSums ? j / kN : 0][j < kSums ? j % kN : 0]; };
    Sum4(at(c), at(c + 1), at(c + 2), at(c + 3), sums + c);
  }
  for (int a = 0; a < kO; a++)
    for (int b = 0; b < kN; b++) {
      float sum = sums[a * kN + b];
      for (int64_t j = i; j < k; j++) sum = MulAdd(Scalar(w[a * k + j]), x[b * k + j], sum);
      y[b * o + a] = sum;
    }
}

// Outputs of a group, and of a tile of 4 rows: with 2 by 4, 8 sums and what feeds them fit the 16 registers of AVX2. One
// or two rows take the whole group at once: fewer than 8 sums wait for one another.
constexpr int kGroup = kLanes == 16 ? 8 : 4;
constexpr int kOutputs = kGroup / 2;

// All rows for `kO` outputs (a group, or one that is left over).
template <int kO, typename W>
static void AllRows(const float* x, const W* w, const W* next, float* y, int64_t n, int64_t k, int64_t o) {
  constexpr int kHalf = kO == kGroup ? kOutputs : kO;
  int64_t b = 0;
  for (; b + 4 <= n; b += 4)
    for (int a = 0; a < kO; a += kHalf)
      Tile<kHalf, 4>(x + b * k, w + a * k, next + a * k, y + b * o + a, k, o);
  if (n - b == 3)
    for (int a = 0; a < kO; a += kHalf)
      Tile<kHalf, 3>(x + b * k, w + a * k, next + a * k, y + b * o + a, k, o);
  if (n - b == 2) Tile<kO, 2>(x + b * k, w, next, y + b * o, k, o);
  if (n - b == 1) Tile<kO, 1>(x + b * k, w, next, y + b * o, k, o);
}

// y[b, a] = x[b] . w[a] for rows b of [0, n) and outputs a of [first, last); a row of y is `stride` wide, and w holds
// `total` outputs in all.
template <typename W>
static void Outputs(const float* x, const W* w, float* y, int64_t n, int64_t k, int64_t stride, int64_t total,
                    int64_t first, int64_t last) {
  int64_t a = first;
  for (; a + kGroup <= last; a += kGroup) {
    int64_t ahead = a + 3 * kGroup <= total ? a + 2 * kGroup : a;
    AllRows<kGroup>(x, w + a * k, w + ahead * k, y + a, n, k, stride);
  }
  for (; a + kOutputs <= last; a += kOutputs) AllRows<kOutputs>(x, w + a * k, w + a * k, y + a, n, k, stride);
  for (; a < last; a++) AllRows<1>(x, w + a * k, w + a * k, y + a, n, k, stride);
}

static inline void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Runs work(0) ... work(count - 1) on this thread and the pool's. Threads take pieces until none is left; nobody ever
// waits for a thread that has not started.
template <typename Work>
static void Parallel(ffi::ThreadPool& pool, int count, Work work) {
  struct Shared {
    Work work;
    int count;
    std::atomic<int> next{0}, done{0};
    Shared(Work w, int c) : work(std::move(w)), count(c) {}
    void Run() {
      for (int i = next.fetch_add(1); i < count; i = next.fetch_add(1)) {
        work(i);
        done.fetch_add(1, std::memory_order_release);
      }
    }
  };
  auto shared = std::make_shared<Shared>(std::move(work), count);
  for (int64_t i = 1; i < pool.num_threads() && i < count; i++) pool.Schedule([shared] { shared->Run(); });
  shared->Run();
  while (shared->done.load(std::memory_order_acquire) < count) Pause();
}
