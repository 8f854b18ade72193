// Attention of a few queries over the committed slots of a cache and over the nodes of this pass, in one softmax.
//
// XLA runs it as ten small operations a layer. Here each query walks the entries it sees, slots first and nodes behind
// them, so what it adds up and in which order depends on those entries alone: a node's result is the same to the bit
// whether an ancestor is already committed or still a node of this pass, and empty slots cost nothing.

#include <algorithm>
#include <cmath>

#include "tiles.h"

constexpr int kChunk = 8;  // vectors of one output kept in registers

// exp(x) for x <= 0; 0 below -87. Relative error under 2e-7 (Cephes).
static inline Vec Exp(Vec x) {
  typedef int32_t Int __attribute__((vector_size(kLanes * 4)));
  const Vec zero = {}, lowest = zero - 87.0f;
  Int tiny = x < lowest;
  x = (Vec)(((Int)x & ~tiny) | ((Int)lowest & tiny));
  Vec shifted = x * 1.44269504f - 0.5f;
  Int power = __builtin_convertvector(shifted, Int);  // toward zero: the nearest whole number, since x <= 0
  Vec whole = __builtin_convertvector(power, Vec);
  x = x - whole * 0.693359375f + whole * 2.12194440e-4f;
  Vec y = zero + 1.9875691500e-4f;
  y = y * x + 1.3981999507e-3f;
  y = y * x + 8.3334519073e-3f;
  y = y * x + 4.1665795894e-2f;
  y = y * x + 1.6666665459e-1f;
  y = y * x + 5.0000001201e-1f;
  y = y * (x * x) + x + 1.0f;
  Int bits = (Int)y + power * (1 << 23);
  return (Vec)(bits & ~tiny);
}

struct Entries {  // of one row of the batch and one key/value head
  const float* keys;
  const float* values;
  const bool* mask;  // [n, count]
  int64_t count;
};

// out[e] = sum_j weights[j] rows[j][e] for `vectors` vectors of e, in the order of j.
template <int kVectors>
static inline void Mix(const float* weights, const float* const* rows, int64_t count, int64_t at, float* out) {
  Vec acc[kVectors] = {};
  for (int64_t j = 0; j < count; j++) {
    Vec w = Vec{} + weights[j];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; v++) acc[v] = MulAdd(w, Load(rows[j] + at + v * kLanes), acc[v]);
  }
  for (int v = 0; v < kVectors; v++) std::memcpy(out + at + v * kLanes, &acc[v], sizeof(Vec));
}

template <int kVectors>
static int64_t MixFrom(const float* weights, const float* const* rows, int64_t count, int64_t width, int64_t at,
                       float* out) {
  for (; at + kVectors * kLanes <= width; at += kVectors * kLanes) Mix<kVectors>(weights, rows, count, at, out);
  if constexpr (kVectors > 1) at = MixFrom<kVectors / 2>(weights, rows, count, width, at, out);
  return at;
}

static void MixAll(const float* weights, const float* const* rows, int64_t count, int64_t width, float* out) {
  int64_t at = MixFrom<kChunk>(weights, rows, count, width, 0, out);
  for (; at < width; at++) {
    float sum = 0;
    for (int64_t j = 0; j < count; j++) sum = MulAdd(weights[j], rows[j][at], sum);
    out[at] = sum;
  }
}

static void AttendHead(const float* queries, int64_t n, int64_t width, const Entries (&parts)[2], float scale,
                       float softcap, float* out) {
  // Slots behind the last one that any query sees are not read.
  int64_t used[2];
  for (int p = 0; p < 2; p++) {
    used[p] = 0;
    for (int64_t i = 0; i < n; i++) {
      const bool* mask = parts[p].mask + i * parts[p].count;
      int64_t last = parts[p].count;
      while (last > used[p] && !mask[last - 1]) last--;
      used[p] = std::max(used[p], last);
    }
  }
  int64_t total = used[0] + used[1], padded = (total + kLanes - 1) / kLanes * kLanes;
  thread_local std::vector<float> scores, weights;
  thread_local std::vector<const float*> rows;
  scores.resize(n * total);
  weights.resize(padded);
  rows.resize(total);
  Outputs(queries, parts[0].keys, scores.data(), n, width, total, used[0], 0, used[0]);
  Outputs(queries, parts[1].keys, scores.data() + used[0], n, width, total, used[1], 0, used[1]);
  for (int64_t i = 0; i < n; i++) {
    int64_t seen = 0;
    float top = -INFINITY;
    for (int p = 0; p < 2; p++) {
      const bool* mask = parts[p].mask + i * parts[p].count;
      const float* score = scores.data() + i * total + p * used[0];
      for (int64_t j = 0; j < used[p]; j++) {
        if (!mask[j]) continue;
        float s = score[j] * scale;
        if (softcap > 0) s = std::tanh(s / softcap) * softcap;
        weights[seen] = s;
        rows[seen++] = parts[p].values + j * width;
        top = std::max(top, s);
      }
    }
    for (int64_t j = seen; j < padded; j++) weights[j] = -INFINITY;
    Vec sum = {};
    for (int64_t j = 0; j < seen; j += kLanes) {
      Vec e = Exp(Load(weights.data() + j) - top);
      std::memcpy(weights.data() + j, &e, sizeof(e));
      sum += e;
    }
    float sums[4];
    Sum4(sum, sum, sum, sum, sums);
    float share = seen > 0 ? 1.0f / sums[0] : 0.0f;
    MixAll(weights.data(), rows.data(), seen, width, out + i * width);
    for (int64_t e = 0; e < width; e++) out[i * width + e] *= share;
  }
}

using Floats = ffi::Buffer<ffi::F32, 4>;
using Bools = ffi::Buffer<ffi::PRED, 4>;

static ffi::Error Attend(ffi::ThreadPool pool, Floats query, Floats new_keys, Floats new_values, Bools new_mask,
                         Floats keys, Floats values, Bools mask, ffi::ResultBuffer<ffi::F32, 4> out, float scale,
                         float softcap) {
  int64_t batch = query.dimensions()[0], groups = query.dimensions()[1], n = query.dimensions()[2];
  int64_t width = query.dimensions()[3], nodes = new_keys.dimensions()[2], slots = keys.dimensions()[2];
  bool fits = new_keys.dimensions() == new_values.dimensions() && keys.dimensions() == values.dimensions() &&
              new_keys.dimensions()[3] == width && keys.dimensions()[3] == width &&
              new_mask.dimensions()[2] == n && new_mask.dimensions()[3] == nodes && mask.dimensions()[2] == n &&
              mask.dimensions()[3] == slots;
  if (!fits) return ffi::Error::InvalidArgument("attend: shapes do not fit together");
  auto work = [=](int i) mutable {
    int64_t row = i / groups;
    Entries parts[2] = {{keys.typed_data() + i * slots * width, values.typed_data() + i * slots * width,
                         mask.typed_data() + row * n * slots, slots},
                        {new_keys.typed_data() + i * nodes * width, new_values.typed_data() + i * nodes * width,
                         new_mask.typed_data() + row * n * nodes, nodes}};
    AttendHead(query.typed_data() + i * n * width, n, width, parts, scale, softcap,
               out->typed_data() + i * n * width);
  };
  Parallel(pool, static_cast<int>(batch * groups), std::move(work));
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(HsdAttend, Attend,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Bools>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Bools>()
                                  .Ret<Floats>()
                                  .Attr<float>("scale")
                                  .Attr<float>("softcap"));
