// Operations on single rows: lookup in a table, root-mean-square norm, rotary embedding, the places of the largest
// numbers.
//
// The lookup reads the table without a conversion. XLA cannot gather bfloat16 on a CPU: it would convert the whole
// table at every call of the decode loop.
//
// XLA sums squares in an order that depends on the number of rows, and it rounds a rotation once or twice, depending on
// the operations that it is fused with. Here a row's result depends only on the row.

#include <cmath>

#include "tiles.h"

static constexpr char kEps[] = "eps";

// y = x / sqrt(mean(x^2) + eps) * weight over the last axis.
static ffi::Error RmsNorm(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> weight,
                          ffi::ResultBuffer<ffi::F32> y, ffi::Attr<float, kEps> eps) {
  int64_t width = weight.element_count(), rows = width < 1 ? 0 : x.element_count() / width;
  const float *from = x.typed_data(), *w = weight.typed_data();
  ByRows(pool, rows, width, [=, to = y->typed_data(), epsilon = *eps](int64_t r) {
    const float* in = from + r * width;
    float* out = to + r * width;
    Vec sums[4] = {};
    int64_t i = 0;
    for (; i + 4 * kLanes <= width; i += 4 * kLanes)
      for (int j = 0; j < 4; j++) {
        Vec v = Load(in + i + j * kLanes);
        sums[j] = MulAdd(v, v, sums[j]);
      }
    float parts[8];
    Sum8(sums[0], sums[1], sums[2], sums[3], Vec{}, Vec{}, Vec{}, Vec{}, parts);
    float total = (parts[0] + parts[1]) + (parts[2] + parts[3]);
    for (; i < width; i++) total = MulAdd(in[i], in[i], total);
    float scale = 1.0f / std::sqrt(total / width + epsilon);
    for (i = 0; i < width; i++) out[i] = in[i] * scale * w[i];
  });
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(HsdRmsNorm, RmsNorm);

using Floats4 = ffi::Buffer<ffi::F32, 4>;
using Floats3 = ffi::Buffer<ffi::F32, 3>;

// Some heads [B, N, h, E] of nodes, and the tables cosine and signed sine [B, N, E] by which they are rotated.
struct Heads {
  const float *x, *cosine, *sine;  // without tables they are only copied
  int64_t num, count, width;
  Heads(const Floats4& heads, const Floats3* c, const Floats3* s)
      : x(heads.typed_data()), cosine(c ? c->typed_data() : nullptr), sine(s ? s->typed_data() : nullptr),
        num(heads.dimensions()[1]), count(heads.dimensions()[2]), width(heads.dimensions()[3]) {}

  // Writes the heads of node r, counted over all rows of the batch, to y [B, groups, N, h / groups, E]. Elements i and
  // i + E/2 are a pair.
  void Write(int64_t r, int64_t groups, float* y) const {
    const int64_t each = count / groups, half = width / 2;
    for (int64_t h = 0; h < count; h++) {
      const float* in = x + (r * count + h) * width;
      float* out = y + (((r / num * groups + h / each) * num + r % num) * each + h % each) * width;
      if (cosine == nullptr) {
        std::memcpy(out, in, width * sizeof(float));
        continue;
      }
      const float *c = cosine + r * width, *s = sine + r * width;
      for (int64_t i = 0; i < half; i++) out[i] = MulAdd(in[i], c[i], in[i + half] * s[i]);
      for (int64_t i = half; i < width; i++) out[i] = MulAdd(in[i], c[i], in[i - half] * s[i]);
    }
  }
};

// Rotates queries and keys, and puts them and the values in the order in which attention reads them: by key/value head.
static ffi::Error Rope(ffi::ThreadPool pool, Floats4 query, Floats4 key, Floats4 value, Floats3 cosine, Floats3 sine,
                       Floats3 key_cosine, Floats3 key_sine, ffi::ResultBuffer<ffi::F32, 4> queries,
                       ffi::ResultBuffer<ffi::F32, 4> keys, ffi::ResultBuffer<ffi::F32, 4> values) {
  auto fits = [](const Floats4& x, const Floats3& table) {
    auto of = x.dimensions(), at = table.dimensions();
    return at[0] == of[0] && at[1] == of[1] && at[2] == of[3];
  };
  const int64_t batch = query.dimensions()[0], groups = key.dimensions()[2];
  if (!fits(query, cosine) || !fits(query, sine) || !fits(key, key_cosine) || !fits(key, key_sine) ||
      !(key.dimensions() == value.dimensions()) || groups < 1 || query.dimensions()[2] % groups != 0)
    return ffi::Error::InvalidArgument("rope: the tables do not fit the heads");
  const Heads of_queries(query, &cosine, &sine), of_keys(key, &key_cosine, &key_sine), of_values(value, nullptr, nullptr);
  float *q = queries->typed_data(), *k = keys->typed_data(), *v = values->typed_data();
  const int64_t query_rows = batch * of_queries.num, key_rows = batch * of_keys.num;
  const int64_t numbers = (query_rows * of_queries.count + 2 * key_rows * groups) * of_keys.width;
  const int64_t pieces = std::clamp<int64_t>(numbers / (4 << 10), 1, Threads(pool));
  Parallel(pool, static_cast<int>(pieces), [=](int i) {
    for (int64_t r = query_rows * i / pieces; r < query_rows * (i + 1) / pieces; r++) of_queries.Write(r, groups, q);
    for (int64_t r = key_rows * i / pieces; r < key_rows * (i + 1) / pieces; r++) {
      of_keys.Write(r, groups, k);
      of_values.Write(r, groups, v);
    }
  });
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(HsdRope, Rope);

// The first place of the largest number of each row. In a row of NaNs it is the last place. A row whose flag is false
// gets 0. Without flags all rows are active.
static ffi::Error FirstBest(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, Flags flags, ffi::ResultBuffer<ffi::S32> best) {
  int64_t rows = best->element_count(), width = rows < 1 ? 0 : x.element_count() / rows;
  if (width < 1 && rows > 0) return ffi::Error::InvalidArgument("first_best: rows of no width");
  int32_t* to = best->typed_data();
  auto find = [=, from = x.typed_data()](int64_t r) {
    const float* in = from + r * width;
    float top = -INFINITY;
    int64_t i = 0;
    if (width >= 4 * kLanes) {
      Vec tops[4];
      for (Vec& most : tops) most = Vec{} - INFINITY;
      for (; i + 4 * kLanes <= width; i += 4 * kLanes)
        for (int j = 0; j < 4; j++) {
          Vec v = Load(in + i + j * kLanes);
          tops[j] = v > tops[j] ? v : tops[j];
        }
      for (const Vec& most : tops)
        for (int j = 0; j < kLanes; j++) top = most[j] > top ? most[j] : top;
    }
    for (; i < width; i++) top = in[i] > top ? in[i] : top;
    int64_t place = 0;
    while (place + 1 < width && in[place] != top) place++;
    to[r] = static_cast<int32_t>(place);
  };
  return ByRows(pool, flags, rows, width, find, [=](int64_t r) { to[r] = 0; });
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(HsdFirstBest, FirstBest);

// How many numbers of a row are compared at once.
constexpr int64_t kBlock = 4 * kLanes;

// The k largest numbers of each row in falling order, their places, and the log-sum-exp of the row. On a tie the lower
// place comes first. NaN is never among the largest. If a row has fewer than k numbers above -inf, the lowest remaining
// places follow, with -inf. A row whose flag is false gets zeros.
static ffi::Error TopK(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, Flags flags, ffi::ResultBuffer<ffi::F32> best,
                       ffi::ResultBuffer<ffi::S32> places, ffi::ResultBuffer<ffi::F32> total) {
  int64_t rows = total->element_count(), k = rows < 1 ? 0 : best->element_count() / rows;
  int64_t width = rows < 1 ? 0 : x.element_count() / rows;
  if (rows > 0 && (k < 1 || k > width)) return ffi::Error::InvalidArgument("top_k: k must be 1 to the length of a row");
  float *values = best->typed_data(), *sums = total->typed_data();
  int32_t* at = places->typed_data();
  auto find = [=, from = x.typed_data()](int64_t r) {
    const float* in = from + r * width;
    float* value = values + r * k;
    int32_t* place = at + r * k;
    // A sorted list of the best so far. A number not above its last cannot enter, so most blocks need one compare.
    std::fill_n(value, k, -INFINITY);
    int64_t found = 0;
    auto look = [&](int64_t i) {
      float v = in[i];
      if (!(v > value[k - 1])) return;
      int64_t j = std::min(found, k - 1);
      for (; j > 0 && v > value[j - 1]; j--) value[j] = value[j - 1], place[j] = place[j - 1];
      value[j] = v;
      place[j] = static_cast<int32_t>(i);
      found = std::min(found + 1, k);
    };
    int64_t i = 0;
    for (; i + kBlock <= width; i += kBlock) {
      Vec last = Vec{} + value[k - 1];
      Int is_above = Load(in + i) > last;
      for (int j = 1; j < 4; j++) is_above |= Load(in + i + j * kLanes) > last;
      int32_t any = 0;
      for (int j = 0; j < kLanes; j++) any |= is_above[j];
      if (any)
        for (int64_t j = i; j < i + kBlock; j++) look(j);
    }
    for (; i < width; i++) look(i);
    for (int32_t next = 0; found < k; next++)
      if (std::find(place, place + found, next) == place + found) place[found++] = next;
    // The sum of exp(x - largest), in an order that does not depend on the search.
    float top = value[0] > -INFINITY ? value[0] : 0.0f, sum = 0.0f;
    Vec parts[4] = {};
    for (i = 0; i + kBlock <= width; i += kBlock)
      for (int j = 0; j < 4; j++) parts[j] += Exp(Load(in + i + j * kLanes) - top);
    Vec rest = (parts[0] + parts[1]) + (parts[2] + parts[3]);
    for (int j = 0; j < kLanes; j++) sum += rest[j];
    for (; i < width; i++) sum += std::exp(in[i] - top);
    sums[r] = top + std::log(sum);
  };
  return ByRows(pool, flags, rows, width, find, [=](int64_t r) {
    std::fill_n(values + r * k, k, 0.0f);
    std::fill_n(at + r * k, k, 0);
    sums[r] = 0.0f;
  });
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(HsdTopK, TopK);

using Table = ffi::Buffer<ffi::BF16, 2>;

// y[r] = table[index[r]] in float32, for a bfloat16 table [V, H]. As in jax, negative indices count from the end, and
// indices outside the table are clamped.
static ffi::Error Gather(Table table, ffi::Buffer<ffi::S32> index, ffi::ResultBuffer<ffi::F32> y) {
  int64_t height = table.dimensions()[0], width = table.dimensions()[1], rows = index.element_count();
  if (height < 1 && rows > 0) return ffi::Error::InvalidArgument("gather: a table without rows");
  const auto* from = static_cast<const uint16_t*>(table.untyped_data());
  for (int64_t r = 0; r < rows; r++) {
    int64_t at = index.typed_data()[r];
    at = std::clamp<int64_t>(at < 0 ? at + height : at, 0, height - 1);
    const uint16_t* in = from + at * width;
    float* out = y->typed_data() + r * width;
    for (int64_t i = 0; i < width; i++) {
      uint32_t bits = static_cast<uint32_t>(in[i]) << 16;
      std::memcpy(out + i, &bits, sizeof(bits));
    }
  }
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(HsdGather, Gather);
