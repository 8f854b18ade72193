// What the CPU kernels share: tiles of a product in registers, work split over XLA's threads.
//
// A sum is added up in an order that depends on the length of the vectors alone: a row's result is the same to the bit
// whatever rows stand beside it.

#pragma once

#include <atomic>
#include <utility>
#include <vector>

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wreturn-type"
#pragma GCC diagnostic ignored "-Wattributes"
#include "xla/ffi/api/ffi.h"
#pragma GCC diagnostic pop

#include "amx.h"
#include "integers.h"
#include "vectors.h"

namespace ffi = xla::ffi;

// Handlers are bound to calls by the types of their parameters. XLA knows those of buffers and attributes.
template <>
struct ffi::CtxBinding<ffi::ThreadPool> {
  using Ctx = ffi::ThreadPool;
};

// A tile of kO outputs, `apart` outputs from one another, by kN rows: y[b * stride + a * apart] = x[b] . w[a * apart].
// The weights of a step stay in registers beside the sums, and one vector of a row at a time: a pair of bfloat16 is taken
// apart once for all rows. Inlined, one tile beside another, sums would lie in memory: 8 rows took twice as long.
template <int kO, int kN, typename X, typename W>
__attribute__((noinline)) static void Tile(const X* x, const W* w, int64_t apart, float* y, int64_t k, int64_t stride) {
  Vec acc[kO][kN] = {};
  const int64_t step = apart * k;
  int64_t i = 0;
  auto add = [&](auto fetch, auto load, auto product) __attribute__((always_inline)) {
    const X* xi = x + i;
    const W* wi = w + i;
    // Hides where they come from. Otherwise the compiler keeps a pointer to each row, and the words from which it takes
    // both halves of a pair: there are no registers for them, and it moves sums to memory in each step.
    asm volatile("" : "+r"(xi), "+r"(wi));
    Vec wv[kO];
#pragma GCC unroll 16
    for (int a = 0; a < kO; a++) fetch(wi + a * step);
#pragma GCC unroll 16
    for (int a = 0; a < kO; a++) wv[a] = load(wi + a * step), Hold(wv[a]);
#pragma GCC unroll 16
    for (int b = 0; b < kN; b++) {
      Vec xv = load(xi + b * k);
      Hold(xv);
#pragma GCC unroll 16
      for (int a = 0; a < kO; a++) acc[a][b] = product(wv[a], xv, acc[a][b]);
    }
  };
  auto fetch = [](const W* p) { Fetch<kO>(p); };
  auto fetch_rest = [](const W* p) {
    if (kPair * sizeof(W) > 64) Fetch<kO>(p + kLanes);
  };
  for (; i + kPair <= k; i += kPair) {
#if defined(__AVX512BF16__)
    if constexpr (sizeof(X) == 2) {
      auto product = [](Vec a, Vec b, Vec c) { return (Vec)_mm512_dpbf16_ps((__m512)c, (__m512bh)a, (__m512bh)b); };
      add(fetch, [](auto* p) { return (Vec)Words(p); }, product);
      continue;
    }
#endif
    auto product = [](Vec a, Vec b, Vec c) { return MulAdd(a, b, c); };
    add(fetch, [](auto* p) { return First(p); }, product);
    add(fetch_rest, [](auto* p) { return Second(p); }, product);
  }
  constexpr int kSums = kO * kN;
  float sums[kSums + 7];
#pragma GCC unroll 16
  for (int c = 0; c < kSums; c += 8) {
    auto at = [&](int j) { return acc[j < kSums ? j / kN : 0][j < kSums ? j % kN : 0]; };
    Sum8(at(c), at(c + 1), at(c + 2), at(c + 3), at(c + 4), at(c + 5), at(c + 6), at(c + 7), sums + c);
  }
  if (i < k)
    for (int a = 0; a < kO; a++)
      for (int b = 0; b < kN; b++) {
        float& sum = sums[a * kN + b];
        for (int64_t j = i; j < k; j++) sum = MulAdd(Scalar(w[a * step + j]), Scalar(x[b * k + j]), sum);
      }
#pragma GCC unroll 16
  for (int b = 0; b < kN; b++)
#pragma GCC unroll 16
    for (int a = 0; a < kO; a++) y[b * stride + a * apart] = sums[a * kN + b];
}

// Rows of a tile at most, and its outputs: sums, weights and a vector of a row fit 32 registers of AVX-512, or 16.
struct OutputShape {
  static constexpr int kRows = kLanes == 16 ? 8 : 6;
  static constexpr int kWide[] = {0, 12, 4, 4, 4, 4, 4, 3, 3}, kNarrow[] = {0, 6, 4, 3, 2, 2, 2};
  template <int kN>
  static constexpr int kStreams = kLanes == 16 ? kWide[kN] : kNarrow[kN];
};

// y[b, a] = x[b] . w[a] for rows b of [0, n) and outputs a of [first, last); a row of y is `stride` wide.
template <typename X, typename W>
static void Outputs(const X* x, const W* w, float* y, int64_t n, int64_t k, int64_t stride, int64_t first,
                    int64_t last) {
  AllTiles<OutputShape>(n, last - first, [=](auto outputs, auto rows, int64_t b, int64_t a, int64_t apart) {
    Tile<outputs, rows>(x + b * k, w + (first + a) * k, apart, y + b * stride + first + a, k, stride);
  });
}

// Weights [o, k] as XLA hands them over.
struct Matrix {
  enum Kind { kFloats, kBfloats, kBytes, kGroups };
  Kind kind;
  const void* data;
  const float* scale;  // of each output, if the weights are whole numbers in 8 bits
  int64_t o, k;
  int64_t output() const {
    return kind == kFloats ? 4 * k : kind == kBfloats ? 2 * k : kind == kBytes ? k : BlocksOf(k) * kBlockSize;
  }
  int64_t bytes() const { return o * output(); }
  // Pieces of the outputs are whole tiles of any height.
  int64_t cut() const {
#if defined(HSD_TILES)
    if (kind == kBfloats) return kTile;
#endif
    return kind == kGroups ? 2 * kGroup : 12;
  }
  // Where piece `p` of `pieces` begins.
  int64_t CutAt(int64_t p, int64_t pieces) const { return p == pieces ? o : o * p / pieces / cut() * cut(); }
};

#if defined(HSD_TILES)
constexpr bool kTurns = true;
static_assert(kRowsAtOnce % kTile == 0, "rows that are turned at once are whole groups");
#else
constexpr bool kTurns = false;
#endif

// The forms in which weights want rows.
struct Forms {
  bool plain = false, paired = false, rounded = false;
  void Add(const Matrix& w) {
    if (w.kind == Matrix::kGroups)
      rounded = true;
    else if (w.kind == Matrix::kBfloats)
      paired = true;
    else
      plain = true;
  }
};

// Rows of width k in each form that some weights want: as they are, taken apart for bfloat16, rounded to 8 bits.
struct Rows {
  const float* plain;
  const Paired* paired;
  RoundedRows rounded;
  int64_t k;
  const uint32_t* turned = nullptr;  // the paired rows for tiles of AMX
  Rows From(int64_t row) const {
    Rows rows = {plain + row * k, paired + row * k, rounded.From(row), k};
#if defined(HSD_TILES)
    rows.turned = turned + GroupAt(row, k);
#endif
    return rows;
  }
};

[[maybe_unused]] static void Outputs(const Rows& x, const Matrix& w, float* y, int64_t n, int64_t stride, int64_t first,
                                     int64_t last) {
  switch (w.kind) {
    case Matrix::kFloats:
      return Outputs(x.plain, static_cast<const float*>(w.data), y, n, w.k, stride, first, last);
    case Matrix::kBfloats:
#if defined(HSD_TILES)
      return TileOutputs(x.paired, x.turned, static_cast<const uint16_t*>(w.data), y, n, w.k, stride, first, last);
#else
      return Outputs(x.paired, static_cast<const uint16_t*>(w.data), y, n, w.k, stride, first, last);
#endif
    case Matrix::kGroups:
      return GroupOutputs(x.rounded, static_cast<const int8_t*>(w.data), w.scale, y, n, stride, first, last);
    case Matrix::kBytes:
      Outputs(x.plain, static_cast<const int8_t*>(w.data), y, n, w.k, stride, first, last);
      for (int64_t b = 0; b < n; b++)
        for (int64_t a = first; a < last; a++) y[b * stride + a] *= w.scale[a];
  }
}

// Into how many pieces `bytes` of weights are cut, `output` of them an output: streams as long as can be, and a piece left
// for whoever is done early.
static int64_t Pieces(int64_t bytes, int64_t output, int64_t cut, int64_t threads) {
  int64_t least = std::max<int64_t>(16 << 10, cut * output), most = std::max<int64_t>(1 << 20, least);
  int64_t size = std::clamp((bytes + 4 * threads - 1) / (4 * threads), least, most);
  return std::max<int64_t>((bytes + size - 1) / size, 1);
}
static int64_t Threads(const ffi::ThreadPool& pool) { return std::max<int64_t>(pool.num_threads(), 1); }

// Takes the next weights, of inputs of width k, from the operands of a call. Scales stand behind weights in 8 bits, which
// have four axes if they are in groups.
[[maybe_unused]] static bool NextMatrix(const ffi::RemainingArgs& operands, size_t* next, int64_t k, Matrix* matrix) {
  auto buffer = operands.get<ffi::AnyBuffer>((*next)++);
  if (buffer.has_error()) return false;
  auto type = buffer->element_type();
  auto sizes = buffer->dimensions();
  if (type != ffi::S8) {
    auto kind = type == ffi::BF16 ? Matrix::kBfloats : Matrix::kFloats;
    if ((type != ffi::F32 && type != ffi::BF16) || sizes.size() != 2 || sizes[1] != k) return false;
    *matrix = {kind, buffer->untyped_data(), nullptr, sizes[0], k};
    return true;
  }
  auto scale = operands.get<ffi::Buffer<ffi::F32, 1>>((*next)++);
  if (scale.has_error()) return false;
  int64_t o = scale->dimensions()[0];
  if (sizes.size() == 2 && sizes[0] == o && sizes[1] == k) {
    *matrix = {Matrix::kBytes, buffer->untyped_data(), scale->typed_data(), o, k};
    return true;
  }
  *matrix = {Matrix::kGroups, buffer->untyped_data(), scale->typed_data(), o, k};
  return sizes.size() == 4 && sizes[0] == (o + kGroup - 1) / kGroup && sizes[1] == BlocksOf(k) * kSteps &&
         sizes[2] == kGroup && sizes[3] == kStep;
}

using Flags = ffi::Buffer<ffi::PRED, 1>;
using FloatRows = ffi::Buffer<ffi::F32, 2>;
// Whether there is one flag per row, or none: then all rows count.
[[maybe_unused]] static bool Fit(const Flags& flags, int64_t rows) {
  return flags.element_count() == 0 || int64_t(flags.element_count()) == rows;
}

// Which rows of a pass count: the nodes of a tree that are worth a check, the tokens of a prompt that is shorter than its
// chunk, the rows of a batch that are not done. The others cost nothing and come out as zeros.
class ActiveRows {
 public:
  ActiveRows(const Flags& flags, int64_t rows) : rows_(rows) {
    if (flags.element_count() == 0) return;
    for (int64_t r = 0; r < rows; r++)
      if (flags.typed_data()[r]) index_.push_back(r);
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

// The rows that count, one behind another, in the forms that the weights want. Few rows are packed at once, by the thread
// that was called; of many, threads pack `pieces` pieces of kPack rows.
constexpr int64_t kPack = 32;
class Packed {
 public:
  Packed(const FloatRows& x, const Flags& flags, Forms forms)
      : active(flags, x.dimensions()[0]), n(active.count()), x_(x.typed_data()), k_(x.dimensions()[1]), forms_(forms),
        copies_(forms.plain && !active.all()), plain_(copies_ ? n * k_ : 0), paired_(forms.paired ? n * k_ : 0),
        rounded_(forms.rounded ? n : 0, k_), turned_(kTurns && forms.paired ? n * (k_ / 2) : 0) {
    if (pieces() == 0) Fill(0, n);
  }
  int pieces() const { return n < 2 * kPack ? 0 : int((n + kPack - 1) / kPack); }
  void FillPiece(int64_t i) { Fill(i * kPack, std::min((i + 1) * kPack, n)); }
  Rows rows() { return {copies_ ? plain_.data() : x_, paired(), rounded_.rows(), k_, turned()}; }

  ActiveRows active;
  int64_t n;

 private:
  void Fill(int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i++) {
      const float* row = x_ + active[i] * k_;
      if (copies_) std::memcpy(plain_.data() + i * k_, row, k_ * sizeof(float));
      if (forms_.paired) Pair(row, k_, paired() + i * k_);
      if (forms_.rounded) rounded_.Round(row, i, 0, k_);
    }
#if defined(HSD_TILES)
    static_assert(kPack % kTile == 0, "rows that are turned at once are whole groups");
    if (forms_.paired) TurnRows(paired(), n, k_, first, last, 0, k_, turned());
#endif
  }
  Paired* paired() { return reinterpret_cast<Paired*>(paired_.data()); }
  uint32_t* turned() { return reinterpret_cast<uint32_t*>(turned_.data()); }

  const float* x_;
  int64_t k_;
  Forms forms_;
  bool copies_;
  Aligned plain_, paired_;
  Rounding rounded_;
  Aligned turned_;
};

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
      while (done.load(std::memory_order_acquire) < count) __builtin_ia32_pause();
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

// Runs work(r) for each of `rows` rows of `width` numbers, in stretches that are worth a thread.
template <typename Work>
[[maybe_unused]] static void ByRows(ffi::ThreadPool& pool, int64_t rows, int64_t width, Work work) {
  int64_t pieces = std::clamp<int64_t>(rows * width / (32 << 10), 1, std::max<int64_t>(rows, 1));
  pieces = std::min(pieces, 4 * Threads(pool));
  auto some = [=](int64_t i) mutable {
    for (int64_t r = rows * i / pieces; r < rows * (i + 1) / pieces; r++) work(r);
  };
  if (pieces == 1) return some(0);
  Parallel(pool, static_cast<int>(pieces), some);
}

// The same with flags: work(r) for rows that count, and skip(r) for the others.
template <typename Work, typename Skip>
[[maybe_unused]] static ffi::Error ByRows(ffi::ThreadPool& pool, const Flags& flags, int64_t rows, int64_t width, Work work,
                                          Skip skip) {
  if (!Fit(flags, rows)) return ffi::Error::InvalidArgument("one flag per row, or none");
  const bool* counts = flags.element_count() ? flags.typed_data() : nullptr;
  ByRows(pool, rows, width, [=](int64_t r) mutable { counts == nullptr || counts[r] ? work(r) : skip(r); });
  return ffi::Error::Success();
}
