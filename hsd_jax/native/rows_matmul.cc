// y_i = x . W_i^T for a few rows x [N, K] and several weights W_i [O_i, K] in float32 or bfloat16, float32 inside.
//
// XLA's CPU product packs the weights for every call, which costs more than the product itself when N is 2 to 32.
// This one streams every weight once, keeps the rows in the first-level cache, and adds up each output in an order
// that depends on K alone: the result for a row is the same to the bit whatever N is.
// Built on first use by native/build.py; nothing here is needed for correctness.

#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
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
static void Deinterleave(const float* x, int64_t n, int64_t k, float* out) {
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
      for (int b = 0; b < kN; b++) acc[a][b] += wv * xv[b];
    }
#pragma GCC unroll 8
    for (int b = 0; b < kN; b++) xv[b] = Load(x + b * k + i + kLanes), Hold(xv[b]);
#pragma GCC unroll 8
    for (int a = 0; a < kO; a++) {
      Vec wv = Second(w + a * k + i);
      Hold(wv);
#pragma GCC unroll 8
      for (int b = 0; b < kN; b++) acc[a][b] += wv * xv[b];
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
      for (int64_t j = i; j < k; j++) sum += Scalar(w[a * k + j]) * x[b * k + j];
      y[b * o + a] = sum;
    }
}

template <int kO, typename W>
static void AllRows(const float* x, const W* w, const W* next, float* y, int64_t n, int64_t k, int64_t o) {
  int64_t b = 0;
  for (; b + 4 <= n; b += 4) Tile<kO, 4>(x + b * k, w, next, y + b * o, k, o);
  if (n - b >= 2) Tile<kO, 2>(x + b * k, w, next, y + b * o, k, o), b += 2;
  if (n - b >= 1) Tile<kO, 1>(x + b * k, w, next, y + b * o, k, o);
}

struct Product {
  const void* w;
  bool is_bf16;
  float* y;
  int64_t o;
};

// Two outputs at a time: with 4 rows, 8 sums and what feeds them fit the 16 registers of AVX2.
constexpr int kOutputs = kLanes == 16 ? 4 : 2;

template <typename W>
static void Outputs(const float* x, const Product& p, int64_t n, int64_t k, int64_t first, int64_t last) {
  const W* w = static_cast<const W*>(p.w);
  int64_t a = first;
  for (; a + kOutputs <= last; a += kOutputs) {
    int64_t ahead = a + 5 * kOutputs <= p.o ? a + 4 * kOutputs : a;
    AllRows<kOutputs>(x, w + a * k, w + ahead * k, p.y + a, n, k, p.o);
  }
  for (; a < last; a++) AllRows<1>(x, w + a * k, w + a * k, p.y + a, n, k, p.o);
}

static inline void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

struct Job {
  const float* x;        // [n, k]
  const float* paired;   // the same, deinterleaved for bfloat16 weights
  std::vector<float> storage;
  int64_t n, k;
  std::vector<Product> products;
  struct Shard { int product; int64_t first, last; };
  std::vector<Shard> shards;
  std::atomic<int> next{0}, done{0};

  // Threads take shards until none is left; nobody ever waits for a thread that has not started.
  void Work() {
    int count = static_cast<int>(shards.size());
    for (int i = next.fetch_add(1); i < count; i = next.fetch_add(1)) {
      const Shard& s = shards[i];
      const Product& p = products[s.product];
      if (p.is_bf16) Outputs<uint16_t>(paired, p, n, k, s.first, s.last);
      else Outputs<float>(x, p, n, k, s.first, s.last);
      done.fetch_add(1, std::memory_order_release);
    }
  }
};

static ffi::Error RowsMatmul(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::RemainingArgs weights,
                             ffi::RemainingRets results) {
  auto job = std::make_shared<Job>();
  job->x = x.typed_data();
  job->n = x.dimensions()[0];
  job->k = x.dimensions()[1];
  if (job->k < 1) return ffi::Error::InvalidArgument("rows_matmul: rows of no width");
  bool any_bf16 = false;
  constexpr int64_t kShardBytes = 64 << 10;
  for (size_t i = 0; i < weights.size(); i++) {
    auto w = weights.get<ffi::AnyBuffer>(i);
    auto y = results.get<ffi::AnyBuffer>(i);
    if (w.has_error() || y.has_error()) return ffi::Error::InvalidArgument("rows_matmul: bad buffer");
    bool is_known = w->element_type() == ffi::F32 || w->element_type() == ffi::BF16;
    if (!is_known || w->dimensions().size() != 2 || w->dimensions()[1] != job->k)
      return ffi::Error::InvalidArgument("rows_matmul: weights must be [out, in] in float32 or bfloat16");
    int64_t o = w->dimensions()[0];
    bool is_bf16 = w->element_type() == ffi::BF16;
    any_bf16 |= is_bf16;
    job->products.push_back({w->untyped_data(), is_bf16, static_cast<float*>((*y)->untyped_data()), o});
    int64_t rows = kShardBytes / (job->k * (is_bf16 ? 2 : 4));
    rows = rows < 16 ? 16 : rows / 4 * 4;
    for (int64_t first = 0; first < o; first += rows)
      job->shards.push_back({static_cast<int>(i), first, first + rows < o ? first + rows : o});
  }
  if (any_bf16) {
    job->storage.resize(job->n * job->k);
    Deinterleave(job->x, job->n, job->k, job->storage.data());
    job->paired = job->storage.data();
  }
  int count = static_cast<int>(job->shards.size());
  int64_t helpers = pool.num_threads() - 1;
  for (int64_t i = 0; i < helpers && i < count - 1; i++) pool.Schedule([job] { job->Work(); });
  job->Work();
  while (job->done.load(std::memory_order_acquire) < count) Pause();
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(HsdRowsMatmul, RowsMatmul,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .RemainingArgs()
                                  .RemainingRets());
