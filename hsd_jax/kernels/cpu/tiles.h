// What the CPU kernels share: vectors, tiles of a product in registers, work split over XLA's threads.
//
// A sum is added up in an order that depends on the length of the vectors alone: a row's result is the same to the bit
// whatever rows stand beside it.

#pragma once

#include <algorithm>
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

static inline Vec Load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}
// x in every lane. To add it to zeros is an operation more, for the compiler may not leave out +0: it changes -0.
static inline Vec All(float x) { return x - Vec{}; }
static inline Vec First(const float* p) { return Load(p); }
static inline Vec Second(const float* p) { return Load(p + kLanes); }
static inline Word Words(const uint16_t* p) {
  Word words;
  std::memcpy(&words, p, sizeof(words));
  return words;
}
static inline Vec First(const uint16_t* p) { return (Vec)(Words(p) << 16); }
static inline Vec Second(const uint16_t* p) { return (Vec)(Words(p) & 0xffff0000u); }
static inline Vec First(const int8_t* p) {
#if defined(__AVX512F__)
  return (Vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
  return (Vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
  Vec v;
  for (int i = 0; i < kLanes; i++) v[i] = p[i];
  return v;
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
  typedef int32_t Int __attribute__((vector_size(kLanes * 4)));
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

// How far ahead of its use a weight is fetched into the second-level cache, in bytes, of all streams of a tile together.
// Each output of a tile is the next of a stream of its own, so what lies behind it in memory is what its stream reads
// next. Outputs that lie side by side are read in turns, which the processor's own prefetching does not follow: fetching
// the tile after next by hand took 1.1 to 1.2 times as long. On two cores of a Zen 4
// 8 rows then read 33 GB/s, and 25 with a fetch into the first-level cache: the next weights push the rows out of it.
constexpr int kAhead = 8192;
template <int kO>
static inline void Fetch(const void* weight) {
  __builtin_prefetch(static_cast<const char*>(weight) + kAhead / kO, 0, 2);
}

// A tile of kO outputs, `apart` outputs from one another, by kN rows: y[b * stride + a * apart] = x[b] . w[a * apart].
// The weights of a step stay in registers beside the sums, and one vector of a row at a time: a pair of bfloat16 is taken
// apart once for all rows. Inlined, one tile beside another, sums would lie in memory: 8 rows took twice as long.
template <int kO, int kN, typename X, typename W>
__attribute__((noinline)) static void Tile(const X* x, const W* w, int64_t apart, float* y, int64_t k, int64_t stride) {
  Vec acc[kO][kN] = {};
  const int64_t step = apart * k;
  int64_t i = 0;
  for (; i + kPair <= k; i += kPair) {
#if defined(__AVX512BF16__)
    if constexpr (sizeof(X) == 2) {
      Vec wv[kO];
#pragma GCC unroll 16
      for (int a = 0; a < kO; a++) {
        Fetch<kO>(w + a * step + i);
        wv[a] = (Vec)Words(w + a * step + i), Hold(wv[a]);
      }
#pragma GCC unroll 16
      for (int b = 0; b < kN; b++) {
        Vec xv = (Vec)Words(x + b * k + i);
        Hold(xv);
#pragma GCC unroll 16
        for (int a = 0; a < kO; a++) acc[a][b] = (Vec)_mm512_dpbf16_ps((__m512)acc[a][b], (__m512bh)wv[a], (__m512bh)xv);
      }
      continue;
    }
#endif
    Vec wv[kO];
#pragma GCC unroll 16
    for (int a = 0; a < kO; a++) {
      Fetch<kO>(w + a * step + i);
      if (kPair * sizeof(W) > 64) Fetch<kO>(w + a * step + i + kLanes);
    }
#pragma GCC unroll 16
    for (int a = 0; a < kO; a++) wv[a] = First(w + a * step + i), Hold(wv[a]);
#pragma GCC unroll 16
    for (int b = 0; b < kN; b++) {
      Vec xv = First(x + b * k + i);
      Hold(xv);
#pragma GCC unroll 16
      for (int a = 0; a < kO; a++) acc[a][b] = MulAdd(wv[a], xv, acc[a][b]);
    }
#pragma GCC unroll 16
    for (int a = 0; a < kO; a++) wv[a] = Second(w + a * step + i), Hold(wv[a]);
#pragma GCC unroll 16
    for (int b = 0; b < kN; b++) {
      Vec xv = Second(x + b * k + i);
      Hold(xv);
#pragma GCC unroll 16
      for (int a = 0; a < kO; a++) acc[a][b] = MulAdd(wv[a], xv, acc[a][b]);
    }
  }
  constexpr int kSums = kO * kN;
  float sums[kSums + 3];
#pragma GCC unroll 16
  for (int c = 0; c < kSums; c += 4) {
    auto at = [&](int j) -> const Vec& { return acc[j < kSums ? j / kN : 0][j < kSums ? j % kN : 0]; };
    Sum4(at(c), at(c + 1), at(c + 2), at(c + 3), sums + c);
  }
  for (int a = 0; a < kO; a++)
    for (int b = 0; b < kN; b++) {
      float sum = sums[a * kN + b];
      for (int64_t j = i; j < k; j++) sum = MulAdd(Scalar(w[a * step + j]), Scalar(x[b * k + j]), sum);
      y[b * stride + a * apart] = sum;
    }
}

// Rows of a tile at most, and its outputs: sums, weights and a vector of a row fit 32 registers of AVX-512, or 16.
constexpr int kRows = kLanes == 16 ? 8 : 6;
constexpr int kWide[] = {0, 12, 6, 6, 4, 4, 4, 3, 3}, kNarrow[] = {0, 6, 4, 3, 2, 2, 2};
template <int kN>
constexpr int kOutputs = kLanes == 16 ? kWide[kN] : kNarrow[kN];
// Tiles of a stream that all rows go through before the next: their weights stay in a near cache meanwhile.
constexpr int kGroup = 4;

// `count` tiles of kO streams, for all rows: the first `larger` blocks of rows have kN of them, the others one less.
template <int kO, int kN, typename X, typename W>
static void Streams(const X* x, const W* w, float* y, int64_t n, int64_t larger, int64_t k, int64_t stride,
                    int64_t count) {
  for (int64_t from = 0; from < count; from += kGroup) {
    int64_t to = std::min<int64_t>(from + kGroup, count);
    for (int64_t b = 0; b < n;) {
      bool is_larger = b < larger * kN;
      for (int64_t a = from; a < to; a++) {
        if (is_larger)
          Tile<kO, kN>(x + b * k, w + a * k, count, y + b * stride + a, k, stride);
        else if constexpr (kN > 1)
          Tile<kO, kN - 1>(x + b * k, w + a * k, count, y + b * stride + a, k, stride);
      }
      b += is_larger ? kN : kN - 1;
    }
  }
}

// The same for outputs [first, last) of any number: as many streams as a tile has outputs, and the few left one by one.
template <int kN, typename X, typename W>
static void Blocks(const X* x, const W* w, float* y, int64_t n, int64_t blocks, int64_t k, int64_t stride,
                   int64_t first, int64_t last) {
  if constexpr (kN < kRows)
    if (n > kN * blocks) return Blocks<kN + 1>(x, w, y, n, blocks, k, stride, first, last);
  constexpr int kO = kOutputs<kN>;
  int64_t larger = n - blocks * (kN - 1), count = (last - first) / kO, rest = first + count * kO;
  Streams<kO, kN>(x, w + first * k, y + first, n, larger, k, stride, count);
  Streams<1, kN>(x, w + rest * k, y + rest, n, larger, k, stride, last - rest);
}

// Rows that go through the weights together: more of them would not stay in the second-level cache.
constexpr int64_t kRowsAtOnce = 64;

// y[b, a] = x[b] . w[a] for rows b of [0, n) and outputs a of [first, last); a row of y is `stride` wide.
template <typename X, typename W>
static void Outputs(const X* x, const W* w, float* y, int64_t n, int64_t k, int64_t stride, int64_t first,
                    int64_t last) {
  for (int64_t b = 0; b < n; b += kRowsAtOnce) {
    int64_t some = std::min(n - b, kRowsAtOnce);
    Blocks<1>(x + b * k, w, y + b * stride, some, (some + kRows - 1) / kRows, k, stride, first, last);
  }
}

// Weights [o, k] as XLA hands them over, and rows for them: as they are, and taken apart for bfloat16.
struct Matrix {
  const void* data;
  bool is_bf16;
  const float* scale;  // of each output, if the weights are whole numbers in 8 bits
  int64_t o, k;
  int64_t output() const { return k * (scale ? 1 : is_bf16 ? 2 : 4); }
  int64_t bytes() const { return o * output(); }
};
struct Rows {
  const float* plain;
  const Paired* paired;
};

[[maybe_unused]] static void Outputs(const Rows& x, const Matrix& w, float* y, int64_t n, int64_t stride, int64_t first,
                                     int64_t last) {
  if (w.is_bf16) return Outputs(x.paired, static_cast<const uint16_t*>(w.data), y, n, w.k, stride, first, last);
  if (!w.scale) return Outputs(x.plain, static_cast<const float*>(w.data), y, n, w.k, stride, first, last);
  Outputs(x.plain, static_cast<const int8_t*>(w.data), y, n, w.k, stride, first, last);
  for (int64_t b = 0; b < n; b++)
    for (int64_t a = first; a < last; a++) y[b * stride + a] *= w.scale[a];
}

// Into how many pieces `bytes` of weights are cut, `output` of them an output: streams as long as can be, and a piece left
// for whoever is done early.
constexpr int kCut = 12;  // whole tiles of any height
static int64_t Pieces(int64_t bytes, int64_t output, int64_t threads) {
  int64_t least = std::max<int64_t>(16 << 10, kCut * output), most = std::max<int64_t>(1 << 20, least);
  int64_t size = std::clamp((bytes + 4 * threads - 1) / (4 * threads), least, most);
  return std::max<int64_t>((bytes + size - 1) / size, 1);
}
// Where piece `p` of `pieces` begins in `o` outputs.
static int64_t CutAt(int64_t o, int64_t p, int64_t pieces) { return p == pieces ? o : o * p / pieces / kCut * kCut; }
static int64_t Threads(const ffi::ThreadPool& pool) { return std::max<int64_t>(pool.num_threads(), 1); }

// Takes the next weights, of inputs of width k, from the operands of a call; scales stand behind weights in 8 bits.
[[maybe_unused]] static bool NextMatrix(const ffi::RemainingArgs& operands, size_t* next, int64_t k, Matrix* matrix) {
  auto buffer = operands.get<ffi::AnyBuffer>((*next)++);
  if (buffer.has_error() || buffer->dimensions().size() != 2 || buffer->dimensions()[1] != k) return false;
  auto type = buffer->element_type();
  *matrix = {buffer->untyped_data(), type == ffi::BF16, nullptr, buffer->dimensions()[0], k};
  if (type != ffi::S8) return type == ffi::F32 || type == ffi::BF16;
  auto scale = operands.get<ffi::Buffer<ffi::F32, 1>>((*next)++);
  if (scale.has_error() || scale->dimensions()[0] != matrix->o) return false;
  matrix->scale = scale->typed_data();
  return true;
}

// Which rows of a pass count: the nodes of a tree that are worth a check, the tokens of a prompt that is shorter than its
// chunk, the rows of a batch that are not done. The others cost nothing and come out as zeros.
class ActiveRows {
 public:
  // `flags` has one flag a row, or none at all: then every row counts.
  ActiveRows(const bool* flags, int64_t num_flags, int64_t rows) : rows_(rows) {
    if (num_flags == 0) return;
    for (int64_t r = 0; r < rows; r++)
      if (flags[r]) index_.push_back(r);
    all_ = int64_t(index_.size()) == rows;
  }
  bool all() const { return all_; }
  int64_t count() const { return all_ ? rows_ : int64_t(index_.size()); }
  int64_t operator[](int64_t i) const { return all_ ? i : index_[i]; }

  // Moves results, which stand one behind another from the first row on, to the rows they belong to: columns [first,
  // last) of y, whose rows are `stride` wide. Zeros elsewhere.
  void Spread(float* y, int64_t stride, int64_t first, int64_t last) const {
    if (all_) return;
    int64_t next = count();
    for (int64_t r = rows_ - 1; r >= 0; r--) {
      float* to = y + r * stride + first;
      if (next > 0 && index_[next - 1] == r) {
        if (--next != r) std::memcpy(to, y + next * stride + first, (last - first) * sizeof(float));
      } else {
        std::memset(to, 0, (last - first) * sizeof(float));
      }
    }
  }

 private:
  int64_t rows_;
  bool all_ = true;
  std::vector<int64_t> index_;
};

// The rows that count, one behind another, in the order that the weights want: for bfloat16 taken apart.
class Packed {
 public:
  Packed(const float* x, const ActiveRows& active, int64_t k, bool any_f32, bool any_bf16)
      : x_(x), k_(k), plain_(any_f32 && !active.all() ? active.count() * k : 0),
        paired_(any_bf16 ? active.count() * k : 0), copies_(any_f32 && !active.all()), pairs_(any_bf16) {}
  // Packs rows [first, last) of those that count.
  void Fill(const ActiveRows& active, int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i++) {
      const float* row = x_ + active[i] * k_;
      if (copies_) std::memcpy(plain_.data() + i * k_, row, k_ * sizeof(float));
      if (pairs_) Pair(row, k_, paired() + i * k_);
    }
  }
  Rows rows() { return {copies_ ? plain_.data() : x_, paired()}; }

 private:
  Paired* paired() { return reinterpret_cast<Paired*>(paired_.data()); }

  const float* x_;
  int64_t k_;
  Aligned plain_, paired_;
  bool copies_, pairs_;
};
// Rows that one thread packs in a go; fewer than two such pieces are packed by the thread that was called.
constexpr int64_t kPack = 32;

static inline void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Runs work(phase, i, thread) for each i below counts[phase], one phase behind the other, on this thread and the pool's.
// Each thread takes the pieces of its own stretch in order, then helps with the others' stretches. A thread that finds
// no more work waits for the pieces others have begun and goes on with the next phase: to schedule it anew would cost
// more. Nobody ever waits for a thread that has not started.
template <size_t kPhases, typename Work>
static void Phases(ffi::ThreadPool& pool, const int (&counts)[kPhases], Work work) {
  struct Stretch {
    alignas(64) std::atomic<int> next;
    int last;
  };
  struct Phase {
    std::vector<Stretch> stretches;
    int count;
    alignas(64) std::atomic<int> done{0};
    void Wait() {
      while (done.load(std::memory_order_acquire) < count) Pause();
    }
  };
  struct Shared {
    Work work;
    Phase phases[kPhases];
    Shared(Work w, const int (&counts)[kPhases], int threads) : work(std::move(w)) {
      for (size_t p = 0; p < kPhases; p++) {
        phases[p].count = counts[p];
        phases[p].stretches = std::vector<Stretch>(threads);
        for (int t = 0; t < threads; t++) {
          phases[p].stretches[t].next = int64_t(counts[p]) * t / threads;
          phases[p].stretches[t].last = int64_t(counts[p]) * (t + 1) / threads;
        }
      }
    }
    void Run(int own) {
      for (size_t p = 0; p < kPhases; p++) {
        if (p > 0) phases[p - 1].Wait();
        auto& stretches = phases[p].stretches;
        for (size_t t = 0; t < stretches.size(); t++) {
          Stretch& stretch = stretches[(own + t) % stretches.size()];
          for (int i = stretch.next.fetch_add(1); i < stretch.last; i = stretch.next.fetch_add(1)) {
            work(p, i, own);
            phases[p].done.fetch_add(1, std::memory_order_release);
          }
        }
      }
    }
  };
  int most = *std::max_element(counts, counts + kPhases);
  int threads = static_cast<int>(std::min<int64_t>(Threads(pool), std::max(most, 1)));
  auto shared = std::make_shared<Shared>(std::move(work), counts, threads);
  for (int t = 1; t < threads; t++) pool.Schedule([shared, t] { shared->Run(t); });
  shared->Run(0);
  shared->phases[kPhases - 1].Wait();
}

// Runs work(0) ... work(count - 1) in one phase.
template <typename Work>
[[maybe_unused]] static void Parallel(ffi::ThreadPool& pool, int count, Work work) {
  Phases(pool, {count}, [work = std::move(work)](int, int i, int) mutable { work(i); });
}

// Runs work(first, last) over stretches of [0, rows), each of about `numbers` numbers or more.
template <typename Work>
[[maybe_unused]] static void ByRows(ffi::ThreadPool& pool, int64_t rows, int64_t width, int64_t numbers, Work work) {
  int64_t pieces = std::clamp<int64_t>(rows * width / numbers, 1, std::max<int64_t>(rows, 1));
  pieces = std::min(pieces, 4 * Threads(pool));
  if (pieces == 1) return work(0, rows);
  Parallel(pool, static_cast<int>(pieces),
           [=](int i) mutable { work(rows * i / pieces, rows * (i + 1) / pieces); });
}
