// Attention of some queries over the committed slots of a cache and over the nodes of this pass, in one softmax.
//
// XLA runs ten small operations per layer for it. Here a vector register holds one number of each of its queries, so no
// sum runs across a vector. Entries are processed in order: first the slots, then the nodes. An entry that a query does
// not see adds a zero, which changes no bit. A node's result is therefore the same whether an ancestor is already
// committed or still a node of this pass. Slots that no query sees are not read, and a query that sees nothing costs
// nothing.

#include <algorithm>
#include <climits>
#include <cmath>

#include "tiles.h"

constexpr int kQueriesAtOnce = 2 * kLanes;

struct Entries {  // of one row of the batch and one key/value head: the slots that any query sees, or the nodes
  const float* keys;
  const float* values;
  int64_t used;
};

// The entries that each of up to kQueriesAtOnce queries sees. Slots are counted from the first one that any query sees.
struct Sight {
  int64_t first[kQueriesAtOnce], last[kQueriesAtOnce];  // slots [first, last) of each query
  const bool* nodes[kQueriesAtOnce];                    // one flag per node
  int64_t all_first = 0, all_last = 0;                  // slots that all queries see

  // Hides the scores of entry j, which is a slot or a node, from the queries that do not see it.
  void Hide(bool is_node, int64_t j, int64_t n, float* scores) const {
    if (!is_node && j >= all_first && j < all_last) return;
    for (int64_t i = 0; i < n; i++)
      if (is_node ? !nodes[i][j] : j < first[i] || j >= last[i]) scores[i] = -INFINITY;
  }
};

// scores[j] = scale keys[j] . queries for kKeys keys and the queries of kVectors vectors. `turned` is [width, queries].
template <int kVectors, int kKeys>
static inline void Score(const float* keys, const float* turned, int64_t width, float scale, float* scores) {
  Vec acc[kKeys][kVectors] = {};
  for (int64_t e = 0; e < width; e++) {
    Vec query[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; v++) query[v] = Load(turned + (e * kVectors + v) * kLanes), Hold(query[v]);
#pragma GCC unroll 8
    for (int j = 0; j < kKeys; j++)
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; v++) acc[j][v] = MulAdd(All(keys[j * width + e]), query[v], acc[j][v]);
  }
  for (int j = 0; j < kKeys; j++)
    for (int v = 0; v < kVectors; v++) {
      Vec scaled = acc[j][v] * scale;
      std::memcpy(scores + (j * kVectors + v) * kLanes, &scaled, sizeof(Vec));
    }
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
        for (int v = 0; v < kVectors; v++) acc[q][v] = MulAdd(All(weights[q]), value[v], acc[q][v]);
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

// The attention of up to kVectors vectors of queries.
template <int kVectors>
static void AttendSome(const float* const* queries, int64_t n, int64_t width, const Entries (&parts)[2],
                       const Sight& sight, float scale, float softcap, float* out) {
  constexpr int kStride = kVectors * kLanes, kKeys = kLanes == 16 ? 8 : 8 / kVectors, kQueries = kLanes == 16 ? 4 : 2;
  constexpr float kHidden = -1e30f;
  thread_local std::vector<float> turned, scores;
  turned.assign(width * kStride, 0.0f);
  for (int64_t i = 0; i < n; i++)
    for (int64_t e = 0; e < width; e++) turned[e * kStride + i] = queries[i][e];
  scores.resize((parts[0].used + parts[1].used) * kStride);

  Vec top[kVectors], sum[kVectors] = {};
  for (Vec& most : top) most = All(kHidden);
  float* score = scores.data();
  for (const Entries& part : parts) {
    const bool is_node = &part == &parts[1];
    // The next keys are fetched meanwhile, and the values of these, which the mix reads: the weights of the layers between
    // have pushed both out of the near caches.
    auto some = [&](auto keys, int64_t j) __attribute__((always_inline)) {
      const float *ahead = part.keys + (j + 2 * keys) * width, *values = part.values + j * width;
      for (int64_t i = 0; i < keys * width; i += 64 / sizeof(float)) {
        __builtin_prefetch(ahead + i);
        __builtin_prefetch(values + i, 0, 2);
      }
      Score<kVectors, keys>(part.keys + j * width, turned.data(), width, scale, score);
      for (int64_t last = j + keys; j < last; j++, score += kStride) {
        if (softcap > 0)
          for (int i = 0; i < kStride; i++) score[i] = std::tanh(score[i] / softcap) * softcap;
        sight.Hide(is_node, j, n, score);
        for (int v = 0; v < kVectors; v++) {
          Vec one = Load(score + v * kLanes);
          top[v] = one > top[v] ? one : top[v];
        }
      }
    };
    int64_t j = 0;
    for (; j + kKeys <= part.used; j += kKeys) some(std::integral_constant<int, kKeys>(), j);
    for (; j < part.used; j++) some(std::integral_constant<int, 1>(), j);
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

using Floats = ffi::Buffer<ffi::F32, 4>;
using Bools = ffi::Buffer<ffi::PRED, 3>;
using Ints = ffi::Buffer<ffi::S32, 2>;

static constexpr char kScale[] = "scale", kSoftcap[] = "softcap";

static ffi::Error Attend(ffi::ThreadPool pool, Floats query, Floats new_keys, Floats new_values, Bools new_mask,
                         Floats keys, Floats values, Ints first_slots, Ints last_slots,
                         ffi::ResultBuffer<ffi::F32, 3> out, ffi::Attr<float, kScale> scale,
                         ffi::Attr<float, kSoftcap> softcap) {
  auto dims = query.dimensions();
  const int64_t batch = dims[0], groups = dims[1], num = dims[2], width = dims[3];
  const int64_t nodes = new_mask.dimensions()[1], seen = new_mask.dimensions()[2], slots = keys.dimensions()[2];
  bool fits = new_keys.dimensions() == new_values.dimensions() && keys.dimensions() == values.dimensions() &&
              new_keys.dimensions()[2] == seen && new_keys.dimensions()[3] == width && keys.dimensions()[3] == width &&
              nodes > 0 && num % nodes == 0 && first_slots.dimensions()[1] == nodes && last_slots.dimensions()[1] == nodes &&
              int64_t(out->element_count()) == batch * groups * num * width;
  if (!fits) return ffi::Error::InvalidArgument("attend: shapes do not fit together");
  const int64_t each = num / nodes;  // queries of a node, which see the same entries
  // Queries [from, to) of key/value head `head` of all rows. Results are in the order of the nodes, [B, N, G * each * E].
  auto attend_head = [=, query = query.typed_data(), new_keys = new_keys.typed_data(), keys = keys.typed_data(),
                      new_values = new_values.typed_data(), values = values.typed_data(), mask = new_mask.typed_data(),
                      first_slots = first_slots.typed_data(), last_slots = last_slots.typed_data(),
                      out = out->typed_data(), scale = *scale, softcap = *softcap](int64_t head, int64_t from, int64_t to) {
    int64_t n = 0, least = slots, most = 0, used = 0;
    const float* queries[kQueriesAtOnce];
    float* outs[kQueriesAtOnce];
    Sight sight;
    for (int64_t i = from; i < to; i++) {
      int64_t node = head / groups * nodes + i / each;
      float* own_out = out + ((node * groups + head % groups) * each + i % each) * width;
      const bool* own_mask = mask + node * seen;
      int64_t first = std::max<int32_t>(first_slots[node], 0), last = std::min<int64_t>(last_slots[node], slots);
      int64_t own = seen;
      while (own > 0 && !own_mask[own - 1]) own--;
      if (first >= last && own == 0) {
        std::memset(own_out, 0, width * sizeof(float));
        continue;
      }
      if (first >= last) first = last = 0;
      if (first < last) least = std::min(least, first), most = std::max(most, last);
      used = std::max(used, own);
      queries[n] = query + (head * num + i) * width, outs[n] = own_out;
      sight.first[n] = first, sight.last[n] = last, sight.nodes[n] = own_mask;
      n++;
    }
    if (n == 0) return;
    least = std::min(least, most);
    sight.all_last = LLONG_MAX;
    for (int64_t i = 0; i < n; i++) {
      sight.first[i] -= least, sight.last[i] -= least;
      sight.all_first = std::max(sight.all_first, sight.first[i]);
      sight.all_last = std::min(sight.all_last, sight.last[i]);
    }
    const int64_t slot = (head * slots + least) * width, node = head * seen * width;
    const Entries parts[2] = {{keys + slot, values + slot, most - least}, {new_keys + node, new_values + node, used}};
    thread_local std::vector<float> mixed;
    mixed.resize(n * width);
    auto attend = n > kLanes ? AttendSome<2> : AttendSome<1>;
    attend(queries, n, width, parts, sight, scale, softcap, mixed.data());
    for (int64_t i = 0; i < n; i++) std::memcpy(outs[i], mixed.data() + i * width, width * sizeof(float));
  };
  int64_t blocks = (num + kQueriesAtOnce - 1) / kQueriesAtOnce;
  Parallel(pool, static_cast<int>(batch * groups * blocks), [=](int i) {
    int64_t from = i % blocks * kQueriesAtOnce;
    attend_head(i / blocks, from, std::min<int64_t>(from + kQueriesAtOnce, num));
  });
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(HsdAttend, Attend);
