// Attention of a few queries over the committed slots of a cache and over the nodes of this pass, in one softmax.
//
// XLA runs it as ten small operations a layer. Here a vector holds one number of each of its queries, so that no sum
// runs across a vector, and entries are walked in order, slots first and nodes behind them. An entry that a query does
// not see adds a zero, which changes no bit: a node's result is the same whether an ancestor is already committed or
// still a node of this pass, and slots behind the last one that anybody sees cost nothing.

#include <algorithm>
#include <cmath>

#include "tiles.h"

struct Entries {  // of one row of the batch and one key/value head: the slots, or the nodes
  const float* keys;
  const float* values;
  const bool* mask;  // [n, count]
  int64_t count;
  int64_t used;   // behind the last one that any of the queries at hand sees
  int64_t clear;  // all of them see the first `clear`
};

static void Bound(Entries& part, int64_t n) {
  part.used = 0;
  for (int64_t i = 0; i < n; i++) {
    const bool* mask = part.mask + i * part.count;
    int64_t last = part.count;
    while (last > part.used && !mask[last - 1]) last--;
    part.used = std::max(part.used, last);
  }
  part.clear = part.used;
  for (int64_t i = 0; i < n; i++) {
    const bool* mask = part.mask + i * part.count;
    if (const void* hidden = part.clear > 0 ? std::memchr(mask, 0, part.clear) : nullptr)
      part.clear = static_cast<const bool*>(hidden) - mask;
  }
}

// scores[j] = keys[j] . queries for kKeys keys and the queries of kVectors vectors; `turned` is [width, queries].
template <int kVectors, int kKeys>
static inline void Score(const float* keys, const float* turned, int64_t width, float* scores) {
  Vec acc[kKeys][kVectors] = {};
  for (int64_t e = 0; e < width; e++) {
    Vec query[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; v++) query[v] = Load(turned + (e * kVectors + v) * kLanes), Hold(query[v]);
#pragma GCC unroll 8
    for (int j = 0; j < kKeys; j++)
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; v++) acc[j][v] = MulAdd(Vec{} + keys[j * width + e], query[v], acc[j][v]);
  }
  for (int j = 0; j < kKeys; j++)
    for (int v = 0; v < kVectors; v++)
      std::memcpy(scores + (j * kVectors + v) * kLanes, &acc[j][v], sizeof(Vec));
}

// out[q][e] = share[q] sum_j weights[j][q] values[j][e] for kQueries queries and kVectors vectors of e from `at` on.
template <int kQueries, int kVectors>
static inline void Mix(const float* weights, int64_t stride, const float* share, const Entries (&parts)[2],
                       int64_t width, int64_t at, float* out) {
  Vec acc[kQueries][kVectors] = {};
  for (const Entries& part : parts) {
    const float* values = part.values + at;
    for (int64_t j = 0; j < part.used; j++, values += width, weights += stride) {
      Vec value[kVectors];
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; v++) value[v] = Load(values + v * kLanes), Hold(value[v]);
#pragma GCC unroll 8
      for (int q = 0; q < kQueries; q++)
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; v++) acc[q][v] = MulAdd(Vec{} + weights[q], value[v], acc[q][v]);
    }
  }
  for (int q = 0; q < kQueries; q++)
    for (int v = 0; v < kVectors; v++) {
      Vec scaled = acc[q][v] * share[q];
      std::memcpy(out + q * width + at + v * kLanes, &scaled, sizeof(Vec));
    }
}

template <int kQueries, int kVectors>
static int64_t MixFrom(const float* weights, int64_t stride, const float* share, const Entries (&parts)[2],
                       int64_t width, int64_t at, float* out) {
  for (; at + kVectors * kLanes <= width; at += kVectors * kLanes)
    Mix<kQueries, kVectors>(weights, stride, share, parts, width, at, out);
  if constexpr (kVectors > 1) at = MixFrom<kQueries, kVectors / 2>(weights, stride, share, parts, width, at, out);
  return at;
}

template <int kQueries>
static void MixAll(const float* weights, int64_t stride, const float* share, const Entries (&parts)[2], int64_t n,
                   int64_t width, float* out) {
  int64_t q = 0;
  for (; q + kQueries <= n; q += kQueries) {
    int64_t at = MixFrom<kQueries, 4>(weights + q, stride, share + q, parts, width, 0, out + q * width);
    for (; at < width; at++)
      for (int i = 0; i < kQueries; i++) {
        float sum = 0;
        const float* weight = weights + q + i;
        for (const Entries& part : parts)
          for (int64_t j = 0; j < part.used; j++, weight += stride) sum = MulAdd(*weight, part.values[j * width + at], sum);
        out[(q + i) * width + at] = sum * share[q + i];
      }
  }
  if constexpr (kQueries > 1) MixAll<kQueries / 2>(weights + q, stride, share + q, parts, n - q, width, out + q * width);
}

// Up to kVectors vectors of queries.
template <int kVectors>
static void AttendSome(const float* queries, int64_t n, int64_t width, Entries (&parts)[2], float scale, float softcap,
                       float* out) {
  constexpr int kStride = kVectors * kLanes, kKeys = 8 / kVectors, kQueries = kLanes == 16 ? 4 : 2;
  constexpr float kHidden = -1e30f;
  thread_local std::vector<float> turned, scores;
  for (Entries& part : parts) Bound(part, n);
  turned.assign(width * kStride, 0.0f);
  for (int64_t i = 0; i < n; i++)
    for (int64_t e = 0; e < width; e++) turned[e * kStride + i] = queries[i * width + e];
  scores.resize((parts[0].used + parts[1].used) * kStride);

  Vec top[kVectors], sum[kVectors] = {};
  for (Vec& most : top) most = Vec{} + kHidden;
  float* score = scores.data();
  for (const Entries& part : parts) {
    float* to = score;
    int64_t j = 0;
    for (; j + kKeys <= part.used; j += kKeys, to += kKeys * kStride)
      Score<kVectors, kKeys>(part.keys + j * width, turned.data(), width, to);
    for (; j < part.used; j++, to += kStride) Score<kVectors, 1>(part.keys + j * width, turned.data(), width, to);
    for (j = 0; j < part.used; j++, score += kStride) {
      for (int i = 0; i < kStride; i++) score[i] *= scale;
      if (softcap > 0)
        for (int i = 0; i < kStride; i++) score[i] = std::tanh(score[i] / softcap) * softcap;
      if (j >= part.clear)
        for (int64_t i = 0; i < n; i++)
          if (!part.mask[i * part.count + j]) score[i] = -INFINITY;
      for (int v = 0; v < kVectors; v++) {
        Vec one = Load(score + v * kLanes);
        top[v] = one > top[v] ? one : top[v];
      }
    }
  }
  for (score = scores.data(); score != scores.data() + scores.size(); score += kStride)
    for (int v = 0; v < kVectors; v++) {
      Vec weight = Exp(Load(score + v * kLanes) - top[v]);
      std::memcpy(score + v * kLanes, &weight, sizeof(Vec));
      sum[v] += weight;
    }
  float share[kStride];
  std::memcpy(share, sum, sizeof(share));
  for (float& one : share) one = one > 0 ? 1.0f / one : 0.0f;
  MixAll<kQueries>(scores.data(), kStride, share, parts, n, width, out);
}

static void AttendHead(const float* queries, int64_t n, int64_t width, const Entries (&parts)[2], float scale,
                       float softcap, float* out) {
  for (int64_t i = 0; i < n; i += 2 * kLanes) {
    int64_t count = std::min<int64_t>(n - i, 2 * kLanes);
    Entries some[2] = {parts[0], parts[1]};
    for (Entries& part : some) part.mask += i * part.count;
    auto attend = count > kLanes ? AttendSome<2> : AttendSome<1>;
    attend(queries + i * width, count, width, some, scale, softcap, out + i * width);
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
                         mask.typed_data() + row * n * slots, slots, 0, 0},
                        {new_keys.typed_data() + i * nodes * width, new_values.typed_data() + i * nodes * width,
                         new_mask.typed_data() + row * n * nodes, nodes, 0, 0}};
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
