// down(act(gate(x)) * (up(x) + bias)) for the rows that count, in one call; the bias is one a row, or none.
//
// As two calls with XLA's activation between them, the threads were scheduled twice and stood still while one of them
// computed the activation and put its rows in order for bfloat16.

#include <cmath>

#include "tiles.h"

// x * sigmoid(x), or x * sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)): the GELU of tanh.
static inline Vec Activate(Vec x, bool is_gelu) {
  const Vec zero = {}, one = zero + 1.0f;
  Vec inner = is_gelu ? x * MulAdd(x * x, zero + 0.0713548163f, zero + 1.5957691216f) : x;
  Vec e = Exp((Vec)((Int)inner | INT32_MIN));  // of -|inner|: it never overflows
  Int below = inner < zero;
  Vec share = (Vec)(((Int)e & below) | ((Int)one & ~below));
  return x * share / (e + one);
}

// Where `Pair` puts number i of a row of k in float32.
[[maybe_unused]] static inline int64_t Place(int64_t i, int64_t k) {
  int64_t in_pair = i % kPair, pair = i - in_pair;
  return pair + kPair <= k ? pair + in_pair / 2 + in_pair % 2 * kLanes : i;
}

// to[.] = act(gate) * up for hidden numbers `first` to `last` of a row of k.
static void Hidden(const float* gate, const float* up, int64_t first, int64_t last, int64_t k, bool is_gelu,
                   bool is_paired, void* row) {
  float* to = static_cast<float*>(row);
  for (int64_t at = first; at < last; at += kLanes, gate += kLanes, up += kLanes) {
    Vec h = Activate(Load(gate), is_gelu) * Load(up);
    int64_t count = std::min<int64_t>(last - at, kLanes);
    if (!is_paired) {
      std::memcpy(to + at, &h, count * sizeof(float));
      continue;
    }
#if defined(__AVX512BF16__)
    __m256bh rounded = _mm512_cvtneps_pbh((__m512)h);
    std::memcpy(static_cast<uint16_t*>(row) + at, &rounded, count * sizeof(uint16_t));
#else
#if defined(__AVX512F__)
    if (at - at % kPair + kPair <= k) {
      const __m512i order = _mm512_set_epi32(15, 13, 11, 9, 7, 5, 3, 1, 14, 12, 10, 8, 6, 4, 2, 0);
      __m512 turned = _mm512_permutexvar_ps(order, (__m512)h);
      _mm256_storeu_ps(to + Place(at, k), _mm512_castps512_ps256(turned));
      _mm256_storeu_ps(to + Place(at + 1, k), _mm512_extractf32x8_ps(turned, 1));
      continue;
    }
#endif
    for (int64_t i = 0; i < count; i++) to[Place(at + i, k)] = h[i];
#endif
  }
}

static ffi::Error GatedMlp(ffi::ThreadPool pool, FloatRows x, Flags flags, FloatRows up_bias,
                           ffi::RemainingArgs weights, ffi::Result<FloatRows> y, bool is_gelu) {
  int64_t rows = x.dimensions()[0], k = x.dimensions()[1];
  Matrix gate, up, down;
  size_t next = 0;
  if (!NextMatrix(weights, &next, k, &gate) || !NextMatrix(weights, &next, k, &up) || up.o != gate.o ||
      !NextMatrix(weights, &next, gate.o, &down) || y->dimensions()[0] != rows || y->dimensions()[1] != down.o || !Fit(flags, rows))
    return ffi::Error::InvalidArgument("gated_mlp: weights must be [out, in], float32, bfloat16 or scaled int8, and fit");
  int64_t width = gate.o, num_biases = up_bias.dimensions()[0];
  if (num_biases != 0 && (num_biases != rows || up_bias.dimensions()[1] != width))
    return ffi::Error::InvalidArgument("gated_mlp: biases must be none, or as many as rows and as wide as the MLP");
  if (k < 1 || width < 1) return ffi::Error::InvalidArgument("gated_mlp: rows of no width");
  int64_t threads = Threads(pool);
  int64_t pieces = Pieces(gate.bytes() + up.bytes(), gate.output() + up.output(), gate.cut(), threads);
  int64_t downs = Pieces(down.bytes(), down.output(), down.cut(), threads);
  int64_t piece = BlocksOf((width + pieces - 1) / pieces) * kBlockSize;  // whole vectors, groups, and blocks of a rounded row
  Forms forms;
  forms.Add(gate), forms.Add(up);
  Packed packed(x, flags, forms);
  const int64_t n = packed.n, some = std::min(n, kRowsAtOnce);
  int pieces_of_rows = packed.pieces();
  bool is_paired = down.kind == Matrix::kBfloats, is_rounded = down.kind == Matrix::kGroups;
  Aligned hidden(is_rounded ? 0 : n * width), sums(threads * 2 * some * piece);
  Aligned turned(kTurns && is_paired ? n * (width / 2) : 0);
  Rounding rounded(is_rounded ? n : 0, width);
  const float* biases = num_biases ? up_bias.typed_data() : nullptr;
  auto work = [=, out = y->typed_data(), packed = std::move(packed), hidden = std::move(hidden),
               rounded = std::move(rounded), sums = std::move(sums),
               turned = std::move(turned)](int phase, int i, int thread) mutable {
    if (phase == 0) return packed.FillPiece(i);
    float* h = hidden.data();
    if (phase == 2) {
      int64_t first = down.CutAt(i, downs), last = down.CutAt(i + 1, downs);
      Rows all = {h, reinterpret_cast<const Paired*>(h), rounded.rows(), width,
                  reinterpret_cast<const uint32_t*>(turned.data())};
      Outputs(all, down, out, n, down.o, first, last);
      return packed.active.Spread(out, down.o, first, last);
    }
    int64_t first = i * piece, last = std::min(first + piece, width);
    float* gates = sums.data() + thread * 2 * some * piece;
    float* ups = gates + some * piece;
    for (int64_t from = 0; from < n; from += some) {
      int64_t count = std::min(n - from, some);
      Rows x = packed.rows().From(from);
      Outputs(x, gate, gates - first, count, piece, first, last);  // where output 0 would stand
      Outputs(x, up, ups - first, count, piece, first, last);
      for (int64_t b = 0; b < count; b++) {
        if (biases != nullptr) {
          const float* bias = biases + packed.active[from + b] * width;
          for (int64_t j = first; j < last; j++) ups[b * piece + j - first] += bias[j];
        }
        float* gated = gates + b * piece;
        int64_t row = (from + b) * width;
        void* to = is_paired ? static_cast<void*>(reinterpret_cast<Paired*>(h) + row) : h + row;
        if (is_rounded) to = gated - first;  // in its own place, and from there to the rounded row
        Hidden(gated, ups + b * piece, first, last, width, is_gelu, is_paired, to);
        if (is_rounded) rounded.Round(gated, from + b, first, last);
      }
#if defined(HSD_TILES)
      if (is_paired)
        TurnRows(reinterpret_cast<const uint16_t*>(h), n, width, from, from + count, first, last,
                 reinterpret_cast<uint32_t*>(turned.data()));
#endif
    }
  };
  Phases(pool, {pieces_of_rows, static_cast<int>((width + piece - 1) / piece), static_cast<int>(downs)}, std::move(work));
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(HsdGatedMlp, GatedMlp,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<FloatRows>()
                                  .Arg<Flags>()
                                  .Arg<FloatRows>()
                                  .RemainingArgs()
                                  .Ret<FloatRows>()
                                  .Attr<bool>("is_gelu"));
