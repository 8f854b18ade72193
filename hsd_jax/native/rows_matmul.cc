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
typedef uint16_t Half __attribute__((vector_size(kLanes * 2)));
typedef uint32_t Word __attribute__((vector_size(kLanes * 4)));

static inline Vec Load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}
static inline Vec Load(const uint16_t* p) {  // bfloat16 is the upper half of a float
#if defined(__AVX512F__)
  return (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#elif defined(__AVX2__)
  return (Vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
#else
  Half h;
  std::memcpy(&h, p, sizeof(h));
  return (Vec)(__builtin_convertvector(h, Word) << 16);
#endif
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
static inline float Sum(Vec v) {
  float s[kLanes];
  std::memcpy(s, &v, sizeof(s));
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; i++) s[i] += s[i + width];
  return s[0];
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
  out[0] = Sum(a), out[1] = Sum(b), out[2] = Sum(c), out[3] = Sum(d);
#endif
}

// A tile of kO outputs by kN rows.
template <int kO, int kN, typename W>  // kO is 4 or 1
static inline void Tile(const float* x, const W* w, float* y, int64_t k, int64_t o) {
  Vec acc[kO][kN] = {};
  int64_t i = 0;
  for (; i + kLanes <= k; i += kLanes) {
    Vec xv[kN];
#pragma GCC unroll 8
    for (int b = 0; b < kN; b++) {
      xv[b] = Load(x + b * k + i);
      Hold(xv[b]);
    }
#pragma GCC unroll 8
    for (int a = 0; a < kO; a++) {
      Vec wv = Load(w + a * k + i);
#pragma GCC unroll 8
      for (int b = 0; b < kN; b++) acc[a][b] += wv * xv[b];
    }
  }
  for (int b = 0; b < kN; b++) {
    float* out = y + b * o;
    if constexpr (kO == 4) Sum4(acc[0][b], acc[1][b], acc[2][b], acc[3][b], out);
    else out[0] = Sum(acc[0][b]);
    for (int64_t j = i; j < k; j++)
      for (int a = 0; a < kO; a++) out[a] += Scalar(w[a * k + j]) * x[b * k + j];
  }
}

template <int kO, typename W>
static void AllRows(const float* x, const W* w, float* y, int64_t n, int64_t k, int64_t o) {
  constexpr int kN = kLanes == 16 ? 6 : 3;
  int64_t b = 0;
  for (; b + kN <= n; b += kN) Tile<kO, kN>(x + b * k, w, y + b * o, k, o);
  for (; b + 2 <= n; b += 2) Tile<kO, 2>(x + b * k, w, y + b * o, k, o);
  for (; b < n; b++) Tile<kO, 1>(x + b * k, w, y + b * o, k, o);
}

struct Product {
  const void* w;
  bool is_bf16;
  float* y;
  int64_t o;
};

template <typename W>
static void Outputs(const float* x, const Product& p, int64_t n, int64_t k, int64_t first, int64_t last) {
  const W* w = static_cast<const W*>(p.w);
  int64_t a = first;
  for (; a + 4 <= last; a += 4) AllRows<4>(x, w + a * k, p.y + a, n, k, p.o);
  for (; a < last; a++) AllRows<1>(x, w + a * k, p.y + a, n, k, p.o);
}

static inline void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

struct Job {
  const float* x;
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
      if (p.is_bf16) Outputs<uint16_t>(x, p, n, k, s.first, s.last);
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
    job->products.push_back({w->untyped_data(), is_bf16, static_cast<float*>((*y)->untyped_data()), o});
    int64_t rows = kShardBytes / (job->k * (is_bf16 ? 2 : 4));
    rows = rows < 16 ? 16 : rows / 4 * 4;
    for (int64_t first = 0; first < o; first += rows)
      job->shards.push_back({static_cast<int>(i), first, first + rows < o ? first + rows : o});
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
