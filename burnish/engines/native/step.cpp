// One step of a Llama-like decoder on packed weights: any mixture of rows (prompt tokens and newest tokens), each with its own
// sequence and position, through all layers to logits. Every sum runs in an order that depends on the row alone, so a row's numbers
// are the same bits whatever stands beside it. Rounding to bfloat16 happens where transformers' modules round.
#include <immintrin.h>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <algorithm>
#include <vector>
#include <thread>
#include <initializer_list>
#include <mutex>
#include <sys/mman.h>
#include <unistd.h>

namespace {

constexpr int PAGE = 16;                       // tokens of a page of the cache, and columns of a tile of weights
typedef uint16_t bf16;

inline float up(bf16 x) { uint32_t u = uint32_t(x) << 16; float f; memcpy(&f, &u, 4); return f; }
inline bf16 down(float f) {
  uint32_t u; memcpy(&u, &f, 4);
  if ((u & 0x7fffffff) > 0x7f800000) return bf16((u >> 16) | 64);
  return bf16((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
inline __m512 up16(const bf16* p) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16)); }
inline void down16(bf16* p, __m512 v) { _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(v)); }
inline __m512 rounded(__m512 v) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(v)), 16)); }

inline __m512 exp16(__m512 x) {                // about 1 ulp; 0 below -87
  const __m512 lo = _mm512_set1_ps(-87.3f), hi = _mm512_set1_ps(88.3f);
  __mmask16 under = _mm512_cmp_ps_mask(x, lo, _CMP_LT_OQ);
  x = _mm512_min_ps(_mm512_max_ps(x, lo), hi);
  __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
  x = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  x = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), x);
  __m512 y = _mm512_set1_ps(1.9875691500e-4f);
  y = _mm512_fmadd_ps(y, x, _mm512_set1_ps(1.3981999507e-3f));
  y = _mm512_fmadd_ps(y, x, _mm512_set1_ps(8.3334519073e-3f));
  y = _mm512_fmadd_ps(y, x, _mm512_set1_ps(4.1665795894e-2f));
  y = _mm512_fmadd_ps(y, x, _mm512_set1_ps(1.6666665459e-1f));
  y = _mm512_fmadd_ps(y, x, _mm512_set1_ps(5.0000001201e-1f));
  y = _mm512_fmadd_ps(y, _mm512_mul_ps(x, x), _mm512_add_ps(x, _mm512_set1_ps(1.0f)));
  y = _mm512_scalef_ps(y, n);
  return _mm512_mask_mov_ps(y, under, _mm512_setzero_ps());
}

// ---- threads: one team, kept; phases are separated by a spinning barrier

struct Barrier {
  int n; std::atomic<int> in{0}; std::atomic<int> turn{0};
  void wait() {
    int t = turn.load(std::memory_order_acquire);
    if (in.fetch_add(1, std::memory_order_acq_rel) == n - 1) { in.store(0, std::memory_order_relaxed); turn.fetch_add(1, std::memory_order_release); return; }
    for (int spins = 0; turn.load(std::memory_order_acquire) == t; ++spins) { if (spins < 20000) _mm_pause(); else std::this_thread::yield(); }
  }
};

// ---- element types: T is what weights, cache and activations are kept in

template <class T> struct Kind;
template <> struct Kind<bf16> {
  static constexpr int K = 2;                  // values of the inner dimension that one lane holds
  static __m512 load(const bf16* p) { return up16(p); }
  static void store(bf16* p, __m512 v) { down16(p, v); }
  static __m512 round(__m512 v) { return rounded(v); }
  static float one(bf16 x) { return up(x); }
  static bf16 make(float f) { return down(f); }
  static __m512 dot(__m512 acc, const bf16* w, const bf16* x) {
    int32_t pair; memcpy(&pair, x, 4);
    return _mm512_dpbf16_ps(acc, (__m512bh)_mm512_loadu_si512(w), (__m512bh)_mm512_set1_epi32(pair));
  }
};
template <> struct Kind<float> {
  static constexpr int K = 1;
  static __m512 load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, __m512 v) { _mm512_storeu_ps(p, v); }
  static __m512 round(__m512 v) { return v; }
  static float one(float x) { return x; }
  static float make(float f) { return f; }
  static __m512 dot(__m512 acc, const float* w, const float* x) { return _mm512_fmadd_ps(_mm512_loadu_ps(w), _mm512_set1_ps(*x), acc); }
};

// R rows x C tiles of 16 columns; w is packed [tile][in/K][16][K]
template <class T, int R, int C, class Out>
inline void block(const T* x, int64_t ldx, const T* w, int64_t tile, int in, const float* bias, const char* const* ahead, Out out) {
  constexpr int K = Kind<T>::K;
  __m512 acc[R][C];
  for (int r = 0; r < R; ++r) for (int c = 0; c < C; ++c) acc[r][c] = _mm512_setzero_ps();
  for (int k = 0; k < in; k += K) {
    __m512 wv[C];
    for (int c = 0; c < C; ++c) wv[c] = _mm512_loadu_ps((const float*)(w + c * tile + int64_t(k) * 16));
    _mm_prefetch(ahead[(k / K) >> 5] + ((k / K) & 31) * 64, _MM_HINT_T1);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      if constexpr (K == 2) {
        int32_t pair; memcpy(&pair, x + r * ldx + k, 4);
        __m512bh xv = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) acc[r][c] = _mm512_dpbf16_ps(acc[r][c], (__m512bh)_mm512_castps_si512(wv[c]), xv);
      } else {
        __m512 xv = _mm512_set1_ps(Kind<T>::one(x[r * ldx + k]));
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) acc[r][c] = _mm512_fmadd_ps(wv[c], xv, acc[r][c]);
      }
    }
  }
  for (int c = 0; c < C; ++c) {
    __m512 b = bias ? _mm512_loadu_ps(bias + c * 16) : _mm512_setzero_ps();
    for (int r = 0; r < R; ++r) out(r, c, _mm512_add_ps(acc[r][c], b));
  }
}

constexpr int MOST_ROWS = 13;                  // 13 rows x 2 tiles of sums, and the weights, fill the registers

template <class T, int R, int C, class Out>
inline void block_of(int rows, const T* x, int64_t ldx, const T* w, int64_t tile, int in, const float* bias, const char* const* ahead, Out out) {
  if (rows == R) block<T, R, C>(x, ldx, w, tile, in, bias, ahead, out);
  else if constexpr (R > 1) block_of<T, R - 1, C>(rows, x, ldx, w, tile, in, bias, ahead, out);
}

constexpr int PIECE = 2048;                    // bytes that are fetched ahead in a row

// what will be needed after a product, fetched while it computes: memory is idle then
struct Later {
  std::vector<const char*> piece; size_t at = 0;
  const char* next(const char* otherwise) { return at < piece.size() ? piece[at++] : otherwise; }
};

// blocks of rows as equal as can be: a small rest would leave most of the registers idle. The first C blocks fetch the next tiles
template <class T, int C, class Out>
inline void rows_of(int rows, const T* x, int64_t ldx, const T* w, int64_t tile, int in, const float* bias, Later* later, Out out) {
  const int blocks = (rows + MOST_ROWS - 1) / MOST_ROWS, pieces = (in / Kind<T>::K + 31) / 32;
  static thread_local std::vector<const char*> ahead; ahead.resize(pieces);
  for (int i = 0, r0 = 0; i < blocks; ++i) {
    const int r1 = int64_t(rows) * (i + 1) / blocks;
    const char* next = (const char*)(w + C * tile) + int64_t(std::min(i, C - 1)) * tile * sizeof(T);
    for (int p = 0; p < pieces; ++p) ahead[p] = i >= C && later ? later->next(next) : next + p * PIECE;
    block_of<T, MOST_ROWS, C>(r1 - r0, x + r0 * ldx, ldx, w, tile, in, bias, ahead.data(), [=](int r, int c, __m512 v) { out(r0 + r, c, v); });
    r0 = r1;
  }
}

// y = x w^T: tiles [from, to) of 16 columns. out(row, column tile, sums)
template <class T, class Out>
void product(int rows, const T* x, int64_t ldx, const T* w, int in, const float* bias, int from, int to, Out out, Later* later = nullptr) {
  int64_t tile = int64_t(in) * 16;
  int t = from;
  for (; t + 2 <= to; t += 2)
    rows_of<T, 2>(rows, x, ldx, w + t * tile, tile, in, bias ? bias + t * 16 : nullptr, later, [&](int r, int c, __m512 v) { out(r, t + c, v); });
  if (t < to)
    rows_of<T, 1>(rows, x, ldx, w + t * tile, tile, in, bias ? bias + t * 16 : nullptr, later, [&](int r, int c, __m512 v) { out(r, t + c, v); });
}

}  // namespace

extern "C" {

struct Layer { const void *qkv, *o, *gate_up, *down; const void *norm1, *norm2; const float* qkv_bias; const void *q_norm, *k_norm; };

struct Model {
  int32_t layers, width, heads, kv_heads, head_dim, inner, vocab, window, threads, is_bf16;
  float eps, scale;
  const Layer* layer;
  const void *embed, *norm, *head;             // embed [vocab, width] as it is; head packed
  const float *cos, *sin;                      // [positions, head_dim], rounded where the model rounds them
};

}

namespace {

template <class T>
struct Step {
  const Model& m; int rows; const int32_t* token; const int32_t* position; const int32_t* table; int pages; const int32_t* slot;
  T* keys; T* values; int64_t num_pages; T* work; float* logits; const int32_t* wanted; int num_wanted;
  Barrier barrier;
  T *hidden, *normed, *qkv, *attended, *act;

  int q_width() const { return m.heads * m.head_dim; }
  int kv_width() const { return m.kv_heads * m.head_dim; }

  void norm(const T* x, const void* weight, T* y, int width) {
    const T* w = (const T*)weight;
    __m512 s = _mm512_setzero_ps();
    for (int i = 0; i < width; i += 16) { __m512 v = Kind<T>::load(x + i); s = _mm512_fmadd_ps(v, v, s); }
    float r = 1.0f / sqrtf(_mm512_reduce_add_ps(s) / width + m.eps);
    __m512 rv = _mm512_set1_ps(r);
    for (int i = 0; i < width; i += 16)
      Kind<T>::store(y + i, _mm512_mul_ps(Kind<T>::round(_mm512_mul_ps(Kind<T>::load(x + i), rv)), Kind<T>::load(w + i)));
  }

  void rotate(T* x, int pos) {
    const int half = m.head_dim / 2;
    const float *c = m.cos + int64_t(pos) * m.head_dim, *s = m.sin + int64_t(pos) * m.head_dim;
    if (half % 16) {
      for (int i = 0; i < half; ++i) {
        auto R = [](float f) { return Kind<T>::one(Kind<T>::make(f)); };
        float a = Kind<T>::one(x[i]), b = Kind<T>::one(x[half + i]);
        x[i] = Kind<T>::make(R(a * c[i]) + R(-b * s[i]));
        x[half + i] = Kind<T>::make(R(b * c[half + i]) + R(a * s[half + i]));
      }
      return;
    }
    for (int i = 0; i < half; i += 16) {
      __m512 a = Kind<T>::load(x + i), b = Kind<T>::load(x + half + i);
      auto R = [](__m512 v) { return Kind<T>::round(v); };
      __m512 y = _mm512_add_ps(R(_mm512_mul_ps(a, _mm512_loadu_ps(c + i))), R(_mm512_sub_ps(_mm512_setzero_ps(), _mm512_mul_ps(b, _mm512_loadu_ps(s + i)))));
      __m512 z = _mm512_add_ps(R(_mm512_mul_ps(b, _mm512_loadu_ps(c + half + i))), R(_mm512_mul_ps(a, _mm512_loadu_ps(s + half + i))));
      Kind<T>::store(x + i, y); Kind<T>::store(x + half + i, z);
    }
  }

  int64_t page_size() const { return int64_t(PAGE) * m.head_dim; }
  T* page(T* base, int layer, int64_t p, int kv) const { return base + ((int64_t(layer) * num_pages + p) * m.kv_heads + kv) * page_size(); }

  // keys of a page lie [head_dim/K][16 tokens][K], values [16/K token groups][head_dim][K]
  void put(int layer, int row) {
    constexpr int K = Kind<T>::K;
    const int pos = position[row], d = m.head_dim, off = pos % PAGE;
    const int64_t p = table[int64_t(slot[row]) * pages + pos / PAGE];
    const T* k = qkv + int64_t(row) * (q_width() + 2 * kv_width()) + q_width();
    const T* v = k + kv_width();
    for (int h = 0; h < m.kv_heads; ++h) {
      T *kp = page(keys, layer, p, h), *vp = page(values, layer, p, h);
      if constexpr (K == 2) {
        for (int i = 0; i < d / 2; ++i) memcpy(kp + (i * PAGE + off) * 2, k + h * d + 2 * i, 4);
        const __mmask32 half = off % 2 ? 0xaaaaaaaa : 0x55555555;
        for (int i = 0; i < d; i += 16) {
          __m512i v16 = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(v + h * d + i)));
          _mm512_mask_storeu_epi16(vp + (off / 2) * d * 2 + i * 2, half, off % 2 ? _mm512_slli_epi32(v16, 16) : v16);
        }
      } else {
        for (int i = 0; i < d; ++i) {
          kp[i * PAGE + off] = k[h * d + i];
          vp[off * d + i] = v[h * d + i];
        }
      }
    }
  }

  template <int G> void attend(int layer, int row, int kv, int g0, float* score) {
    constexpr int K = Kind<T>::K;
    const int d = m.head_dim, last = position[row], first = m.window > 0 ? std::max(0, last - m.window + 1) : 0;
    const int p0 = first / PAGE, p1 = last / PAGE + 1, span = (p1 - p0) * PAGE;
    const int32_t* tab = table + int64_t(slot[row]) * pages;
    const int group = m.heads / m.kv_heads;
    const T* q = qkv + int64_t(row) * (q_width() + 2 * kv_width()) + (kv * group + g0) * d;
    const __m512 scale = _mm512_set1_ps(m.scale);
    __m512 top[G];
    for (int g = 0; g < G; ++g) top[g] = _mm512_set1_ps(-INFINITY);
    for (int p = p0; p < p1; ++p) {
      const T* kp = page(keys, layer, tab[p], kv);
      __m512 acc[G][2];
      for (int g = 0; g < G; ++g) acc[g][0] = acc[g][1] = _mm512_setzero_ps();
      const char* next = (const char*)(p + 1 < p1 ? page(keys, layer, tab[p + 1], kv) : kp);
      const char* vp = (const char*)page(values, layer, tab[p], kv);
      for (int i = 0; i < d; i += 2 * K) {
        for (int line = 0; line < 2; ++line) {
          _mm_prefetch(next + i * PAGE * sizeof(T) + line * 64, _MM_HINT_T0);
          _mm_prefetch(vp + i * PAGE * sizeof(T) + line * 64, _MM_HINT_T1);
        }
        for (int g = 0; g < G; ++g) {
          acc[g][0] = Kind<T>::dot(acc[g][0], kp + i * PAGE, q + g * d + i);
          acc[g][1] = Kind<T>::dot(acc[g][1], kp + (i + K) * PAGE, q + g * d + i + K);
        }
      }
      const int base = p * PAGE;
      __mmask16 seen = 0xffff;
      if (base + PAGE - 1 > last) seen &= __mmask16((1u << (last - base + 1)) - 1);
      if (base < first) seen &= __mmask16(0xffffu << (first - base));
      for (int g = 0; g < G; ++g) {
        __m512 s = _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), seen, _mm512_mul_ps(_mm512_add_ps(acc[g][0], acc[g][1]), scale));
        top[g] = _mm512_max_ps(top[g], s);
        _mm512_storeu_ps(score + g * span + (p - p0) * PAGE, s);
      }
    }
    T* weight = (T*)(score + G * span);          // probabilities as they enter the second product
    float inv[G];
    for (int g = 0; g < G; ++g) {
      __m512 mx = _mm512_set1_ps(_mm512_reduce_max_ps(top[g])), sum = _mm512_setzero_ps();
      for (int i = 0; i < span; i += 16) {
        __m512 e = exp16(_mm512_sub_ps(_mm512_loadu_ps(score + g * span + i), mx));
        sum = _mm512_add_ps(sum, e);
        Kind<T>::store(weight + g * span + i, e);
      }
      inv[g] = 1.0f / _mm512_reduce_add_ps(sum);
    }
    T* out = attended + int64_t(row) * q_width() + (kv * group + g0) * d;
    for (int i = 0; i < d; i += 32) {
      __m512 acc[G][2];
      const bool two = i + 16 < d;
      for (int g = 0; g < G; ++g) acc[g][0] = acc[g][1] = _mm512_setzero_ps();
      for (int p = p0; p < p1; ++p) {
        const T* vp = page(values, layer, tab[p], kv);
        for (int t = 0; t < PAGE; t += K)
          for (int g = 0; g < G; ++g) {
            const T* w = weight + g * span + (p - p0) * PAGE + t;
            acc[g][0] = Kind<T>::dot(acc[g][0], vp + int64_t(t) * d + i * K, w);
            if (two) acc[g][1] = Kind<T>::dot(acc[g][1], vp + int64_t(t) * d + (i + 16) * K, w);
          }
      }
      for (int g = 0; g < G; ++g) {
        Kind<T>::store(out + g * d + i, _mm512_mul_ps(acc[g][0], _mm512_set1_ps(inv[g])));
        if (two) Kind<T>::store(out + g * d + i + 16, _mm512_mul_ps(acc[g][1], _mm512_set1_ps(inv[g])));
      }
    }
  }

  void attend_all(int layer, int row, int kv, float* score) {
    int group = m.heads / m.kv_heads, g = 0;
    for (; g + 4 <= group; g += 4) attend<4>(layer, row, kv, g, score);
    for (; g + 3 <= group; g += 3) attend<3>(layer, row, kv, g, score);
    for (; g + 2 <= group; g += 2) attend<2>(layer, row, kv, g, score);
    for (; g < group; ++g) attend<1>(layer, row, kv, g, score);
  }

  // the pages that this thread will look at, each once where rows in turn share it
  Later* fetch_pages(int layer, int id, Later& later) const {
    int a, b;
    share(rows * m.kv_heads, id, m.threads, a, b);
    later.piece.clear(); later.at = 0;
    const int bytes = page_size() * sizeof(T);
    for (int r = a / m.kv_heads; r * m.kv_heads < b; ++r) {
      const int last = position[r] / PAGE, first = m.window > 0 ? std::max(0, position[r] - m.window + 1) / PAGE : 0;
      const int32_t* tab = table + int64_t(slot[r]) * pages;
      for (int p = first; p <= last; ++p) {
        if (r > 0 && p <= position[r - 1] / PAGE && table[int64_t(slot[r - 1]) * pages + p] == tab[p]) continue;
        for (T* base : {keys, values})
          for (int kv = 0; kv < m.kv_heads; ++kv)
            for (int at = 0; at < bytes; at += PIECE) later.piece.push_back((const char*)page(base, layer, tab[p], kv) + at);
      }
    }
    return &later;
  }

  static void share(int n, int id, int of, int& from, int& to) { from = int64_t(n) * id / of; to = int64_t(n) * (id + 1) / of; }

  void run(int id) {
    if (id >= m.threads) return;
    const int n = m.threads, w = m.width, qw = q_width(), kw = kv_width(), all = qw + 2 * kw;
    int r0, r1, a, b;
    share(rows, id, n, r0, r1);
    Later later;
    std::vector<T> both(size_t(rows) * 32);      // a tile of gate and one of up
    std::vector<float> score(size_t(4) * (pages * PAGE + 16) * 2);
    for (int r = r0; r < r1; ++r) {
      memcpy(hidden + int64_t(r) * w, (const T*)m.embed + int64_t(token[r]) * w, w * sizeof(T));
      norm(hidden + int64_t(r) * w, m.layer[0].norm1, normed + int64_t(r) * w, w);
    }
    barrier.wait();
    for (int l = 0; l < m.layers; ++l) {
      const Layer& L = m.layer[l];
      share(all / 16, id, n, a, b);
      product<T>(rows, normed, w, (const T*)L.qkv, w, L.qkv_bias, a, b, [&](int r, int t, __m512 v) { Kind<T>::store(qkv + int64_t(r) * all + t * 16, v); }, fetch_pages(l, id, later));
      barrier.wait();
      for (int r = r0; r < r1; ++r) {
        T* x = qkv + int64_t(r) * all;
        for (int h = 0; h < m.heads + m.kv_heads; ++h) {
          if (L.q_norm) norm(x + h * m.head_dim, h < m.heads ? L.q_norm : L.k_norm, x + h * m.head_dim, m.head_dim);
          rotate(x + h * m.head_dim, position[r]);
        }
        put(l, r);
      }
      barrier.wait();
      share(rows * m.kv_heads, id, n, a, b);
      for (int i = a; i < b; ++i) attend_all(l, i / m.kv_heads, i % m.kv_heads, score.data());
      barrier.wait();
      share(w / 16, id, n, a, b);
      product<T>(rows, attended, qw, (const T*)L.o, qw, nullptr, a, b, [&](int r, int t, __m512 v) {
        T* h = hidden + int64_t(r) * w + t * 16;
        Kind<T>::store(h, _mm512_add_ps(Kind<T>::load(h), Kind<T>::round(v)));
      });
      barrier.wait();
      for (int r = r0; r < r1; ++r) norm(hidden + int64_t(r) * w, L.norm2, normed + int64_t(r) * w, w);
      barrier.wait();
      // tiles of gate and up stand in turn, so that two tiles make one of the activation
      share(m.inner / 16, id, n, a, b);
      {
        const int64_t tile = int64_t(w) * 16;
        const __m512 one = _mm512_set1_ps(1.0f);
        for (int t = a; t < b; ++t) {
          rows_of<T, 2>(rows, normed, w, (const T*)L.gate_up + int64_t(2 * t) * tile, tile, w, nullptr, nullptr,
                        [&](int r, int c, __m512 v) { Kind<T>::store(both.data() + r * 32 + c * 16, v); });
          for (int r = 0; r < rows; ++r) {
            const __m512 gate = Kind<T>::load(both.data() + r * 32), up = Kind<T>::load(both.data() + r * 32 + 16);
            const __m512 silu = _mm512_div_ps(gate, _mm512_add_ps(one, exp16(_mm512_sub_ps(_mm512_setzero_ps(), gate))));
            Kind<T>::store(act + int64_t(r) * m.inner + t * 16, _mm512_mul_ps(Kind<T>::round(silu), up));
          }
        }
      }
      barrier.wait();
      share(w / 16, id, n, a, b);
      product<T>(rows, act, m.inner, (const T*)L.down, m.inner, nullptr, a, b, [&](int r, int t, __m512 v) {
        T* h = hidden + int64_t(r) * w + t * 16;
        Kind<T>::store(h, _mm512_add_ps(Kind<T>::load(h), Kind<T>::round(v)));
      });
      barrier.wait();
      if (l + 1 < m.layers) {
        for (int r = r0; r < r1; ++r) norm(hidden + int64_t(r) * w, m.layer[l + 1].norm1, normed + int64_t(r) * w, w);
        barrier.wait();
      }
    }
    share(num_wanted, id, n, a, b);
    for (int i = a; i < b; ++i) norm(hidden + int64_t(wanted[i]) * w, m.norm, normed + int64_t(i) * w, w);
    barrier.wait();
    const int tiles = (m.vocab + 15) / 16;
    share(tiles, id, n, a, b);
    product<T>(num_wanted, normed, w, (const T*)m.head, w, nullptr, a, b, [&](int r, int t, __m512 v) {
      __mmask16 in = t * 16 + 16 <= m.vocab ? 0xffff : __mmask16((1u << (m.vocab - t * 16)) - 1);
      _mm512_mask_storeu_ps(logits + int64_t(r) * m.vocab + t * 16, in, Kind<T>::round(v));
    });
  }
};

struct Team {
  std::vector<std::thread> threads; std::atomic<int> turn{0}, done{0}; std::atomic<bool> stop{false}; void (*work)(void*, int) = nullptr; void* arg = nullptr;
  const int size; const pid_t process = getpid();
  explicit Team(int n) : size(n) {
    for (int id = 1; id < n; ++id) threads.emplace_back([this, id] {
      int seen = 0;
      for (;;) {
        for (int spins = 0; turn.load(std::memory_order_acquire) == seen; ++spins)
          if (spins < 20000) _mm_pause(); else turn.wait(seen);
        if (stop.load()) return;
        seen = turn.load(std::memory_order_acquire);
        work(arg, id);
        done.fetch_add(1, std::memory_order_release);
      }
    });
  }
  void run(void (*fn)(void*, int), void* a) {
    work = fn; arg = a; done.store(0, std::memory_order_relaxed);
    turn.fetch_add(1, std::memory_order_release); turn.notify_all();
    fn(a, 0);
    while (done.load(std::memory_order_acquire) < int(threads.size())) _mm_pause();
  }
  ~Team() { stop.store(true); turn.fetch_add(1); turn.notify_all(); for (auto& t : threads) t.join(); }
};

// one piece of work at a time, by n threads; a forked process makes threads of its own
void together(int n, void (*fn)(void*, int), void* arg) {
  static std::mutex one; static Team* team = nullptr;
  std::lock_guard<std::mutex> hold(one);
  if (team && team->process != getpid()) team = nullptr;
  if (!team || team->size != n) { delete team; team = new Team(n); }
  team->run(fn, arg);
}

template <class T>
void step(const Model& m, int rows, const int32_t* token, const int32_t* position, const int32_t* slot, const int32_t* table, int pages,
          T* keys, T* values, int64_t num_pages, T* work, float* logits, const int32_t* wanted, int num_wanted) {
  Step<T> s{m, rows, token, position, table, pages, slot, keys, values, num_pages, work, logits, wanted, num_wanted, {m.threads}, nullptr, nullptr, nullptr, nullptr, nullptr};
  T* p = work;
  s.hidden = p; p += int64_t(rows) * m.width;
  s.normed = p; p += int64_t(rows) * m.width;
  s.qkv = p; p += int64_t(rows) * (s.q_width() + 2 * s.kv_width());
  s.attended = p; p += int64_t(rows) * s.q_width();
  s.act = p;
  together(m.threads, [](void* a, int id) { ((Step<T>*)a)->run(id); }, &s);
}

// tiles [from, until) of 16 rows of w go to tile first + t * every of `to`
template <class T> void pack(const T* w, int out, int in, T* to, int from, int until, int first, int every) {
  const int words = in / Kind<T>::K;           // of 32 bits in a row
  const __m512i row = _mm512_mullo_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), _mm512_set1_epi32(words));
  for (int t = from; t < until; ++t) {
    const int32_t* source = (const int32_t*)(w + int64_t(t) * 16 * in);
    int32_t* target = (int32_t*)(to + int64_t(first + t * every) * in * 16);
    const __mmask16 there = t * 16 + 16 <= out ? 0xffff : __mmask16((1u << (out - t * 16)) - 1);
    for (int k = 0; k < words; ++k)
      _mm512_storeu_si512(target + int64_t(k) * 16, _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), there, row, source + k, 4));
  }
}

template <class T>
void products(const Model& m, int rows, T* work, float* logits) {
  struct P { const Model& m; int rows; T* x; float* logits; Barrier barrier; } p{m, rows, work, logits, {m.threads}};
  together(m.threads, [](void* arg, int id) {
    P& p = *(P*)arg; const Model& m = p.m; int n = m.threads, a, b;
    int qw = m.heads * m.head_dim, all = qw + 2 * m.kv_heads * m.head_dim;
    T* y = p.x + int64_t(p.rows) * std::max(m.inner, std::max(m.width, qw));
    auto keep = [&](int64_t ld) { return [=](int r, int t, __m512 v) { Kind<T>::store(y + r * ld + t * 16, v); }; };
    auto go = [&](const void* w, int in, int tiles) {
      Step<T>::share(tiles, id, n, a, b);
      product<T>(p.rows, p.x, in, (const T*)w, in, nullptr, a, b, keep(int64_t(tiles) * 16));
      p.barrier.wait();
    };
    for (int l = 0; l < m.layers; ++l) {
      const Layer& L = m.layer[l];
      go(L.qkv, m.width, all / 16); go(L.o, qw, m.width / 16); go(L.gate_up, m.width, m.inner / 8); go(L.down, m.inner, m.width / 16);
    }
    Step<T>::share((m.vocab + 15) / 16, id, n, a, b);
    product<T>(p.rows, p.x, m.width, (const T*)m.head, m.width, nullptr, a, b, [&](int r, int t, __m512 v) {
      if (t * 16 + 16 <= m.vocab) _mm512_storeu_ps(p.logits + int64_t(r) * m.vocab + t * 16, v);
    });
  }, &p);
}

struct Draw {
  const float* logits; int vocab; float temperature; int top_k; float top_p, min_p; const double* uniform; int32_t* token; float* logp; int rows, threads;

  struct Row {                                 // logits of a row, the largest taken off, over the temperature
    const float* z; int n; __m512 top, inverse;
    __m512 raw(int i) const { return i + 16 <= n ? _mm512_loadu_ps(z + i) : _mm512_mask_loadu_ps(_mm512_set1_ps(-INFINITY), __mmask16((1u << (n - i)) - 1), z + i); }
    __m512 scaled(int i) const { return _mm512_mul_ps(_mm512_sub_ps(raw(i), top), inverse); }
  };
  void one(int r) const {
    Row row{logits + int64_t(r) * vocab, vocab, _mm512_set1_ps(-INFINITY), _mm512_set1_ps(1.0f)};
    __mmask16 nan = 0; __m512 top = row.top;
    for (int i = 0; i < vocab; i += 16) { __m512 v = row.raw(i); nan |= _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q); top = _mm512_max_ps(top, v); }
    const float most = _mm512_reduce_max_ps(top);
    logp[r] = 0; token[r] = -1;
    if (nan || !std::isfinite(most)) return;
    if (temperature == 0) { int best = 0; while (row.z[best] != most) ++best; token[r] = best; return; }
    row.top = _mm512_set1_ps(most); row.inverse = _mm512_set1_ps(1.0f / temperature);
    if (top_k > 0 || top_p < 1 || min_p > 0) filtered(r, row); else plain(r, row);
  }

  void plain(int r, const Row& row) const {
    const int n = vocab, blocks = (n + 255) / 256;
    std::vector<double> mass(blocks);
    double all = 0;
    for (int k = 0; k < blocks; ++k) {
      __m512 s = _mm512_setzero_ps();
      for (int i = k * 256; i < std::min(n, k * 256 + 256); i += 16) s = _mm512_add_ps(s, exp16(row.scaled(i)));
      mass[k] = _mm512_reduce_add_ps(s); all += mass[k];
    }
    double goal = uniform[r] * all, before = 0; int k = 0;
    while (k + 1 < blocks && before + mass[k] <= goal) before += mass[k++];
    int chosen = -1; double upto = before; float best = -1; int likely = k * 256;
    for (int i = k * 256; i < std::min(n, k * 256 + 256) && chosen < 0; i += 16) {
      float w[16]; _mm512_storeu_ps(w, exp16(row.scaled(i)));
      for (int j = 0; j < 16 && i + j < n; ++j) {
        if (w[j] > best) { best = w[j]; likely = i + j; }
        upto += w[j];
        if (upto > goal && w[j] > 0) { chosen = i + j; break; }
      }
    }
    if (chosen < 0) chosen = likely;           // the goal fell behind the block's last token by rounding
    token[r] = chosen;
    logp[r] = float((double(row.z[chosen]) - _mm512_cvtss_f32(row.top)) / temperature - std::log(all));
  }

  struct Seen { float x; int at; float mass; };

  // those within `reach` of the largest, in order of the vocabulary
  std::vector<Seen> near(const Row& row, float reach) const {
    std::vector<Seen> found;
    for (int i = 0; i < vocab; i += 16) {
      __m512 x = row.scaled(i);
      __mmask16 in = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-reach), _CMP_GE_OQ);
      if (!in) continue;
      float v[16], w[16]; _mm512_storeu_ps(v, x); _mm512_storeu_ps(w, exp16(x));
      for (; in; in &= in - 1) { const int j = __builtin_ctz(in); found.push_back({v[j], i + j, w[j]}); }
    }
    return found;
  }

  void filtered(int r, const Row& row) const {
    double all = 0;
    if (top_p < 1 && top_k == 0)
      for (int i = 0; i < vocab; i += 16) all += _mm512_reduce_add_ps(exp16(row.scaled(i)));
    std::vector<Seen> kept;
    for (float reach = 8; ; reach = reach < 80 ? reach * 2 : INFINITY) {
      kept = near(row, reach);
      const bool whole = !(reach < 80);
      if (top_k > 0 && int(kept.size()) < std::min(top_k, vocab) && !whole) continue;
      std::sort(kept.begin(), kept.end(), [](const Seen& a, const Seen& b) { return a.x > b.x || (a.x == b.x && a.at < b.at); });
      if (top_k > 0 && top_k < int(kept.size())) {
        size_t end = top_k;
        while (end < kept.size() && kept[end].x == kept[top_k - 1].x) ++end;
        kept.resize(end);
      }
      if (top_p < 1) {
        double of = all;
        if (top_k > 0) { of = 0; for (auto& s : kept) of += s.mass; }
        double before = 0; size_t end = 0;
        while (end < kept.size() && before < double(top_p) * of) before += kept[end++].mass;
        if (end == kept.size() && before < double(top_p) * of && top_k == 0 && !whole) continue;
        kept.resize(end);
      } else if (top_k == 0 && min_p > 0 && -std::log(min_p) > reach && !whole) continue;
      break;
    }
    if (min_p > 0) { const float floor = std::log(min_p); while (kept.size() > 1 && kept.back().x < floor) kept.pop_back(); }
    std::sort(kept.begin(), kept.end(), [](const Seen& a, const Seen& b) { return a.at < b.at; });
    double sum = 0;
    for (auto& s : kept) sum += s.mass;
    const double goal = uniform[r] * sum; double upto = 0; const Seen* chosen = nullptr;
    for (auto& s : kept) { upto += s.mass; if (s.mass > 0) chosen = &s; if (upto > goal && s.mass > 0) break; }
    token[r] = chosen->at;
    logp[r] = float((double(row.z[chosen->at]) - _mm512_cvtss_f32(row.top)) / temperature - std::log(sum));
  }
};

}  // namespace

extern "C" {
void burnish_pack(const void* w, int out, int in, int is_bf16, void* to, int first, int every, int threads) {
  struct P { const void* w; int out, in, is_bf16; void* to; int first, every, threads; } p{w, out, in, is_bf16, to, first, every, threads};
  together(threads, [](void* arg, int id) {
    P& p = *(P*)arg; int a, b;
    Step<float>::share((p.out + 15) / 16, id, p.threads, a, b);
    if (p.is_bf16) pack<bf16>((const bf16*)p.w, p.out, p.in, (bf16*)p.to, a, b, p.first, p.every);
    else pack<float>((const float*)p.w, p.out, p.in, (float*)p.to, a, b, p.first, p.every);
  }, &p);
}
void burnish_step(const Model* m, int rows, const int32_t* token, const int32_t* position, const int32_t* slot, const int32_t* table, int pages,
                  void* keys, void* values, int64_t num_pages, void* work, float* logits, const int32_t* wanted, int num_wanted) {
  if (m->is_bf16) step<bf16>(*m, rows, token, position, slot, table, pages, (bf16*)keys, (bf16*)values, num_pages, (bf16*)work, logits, wanted, num_wanted);
  else step<float>(*m, rows, token, position, slot, table, pages, (float*)keys, (float*)values, num_pages, (float*)work, logits, wanted, num_wanted);
}
// one token a row by the inverse of the cumulative distribution; -1 where a row is not usable. temperature 0: the most probable one.
// top_k, top_p, min_p leave tokens out as models.logprobs.sampling_logits does, without ordering the whole vocabulary
void burnish_draw(int threads, const float* logits, int rows, int vocab, float temperature, int top_k, float top_p, float min_p,
                  const double* uniform, int32_t* token, float* logp) {
  Draw d{logits, vocab, temperature, top_k, top_p, min_p, uniform, token, logp, rows, threads};
  together(threads, [](void* arg, int id) {
    const Draw& d = *(const Draw*)arg; int a, b;
    Step<float>::share(d.rows, id, d.threads, a, b);
    for (int r = a; r < b; ++r) d.one(r);
  }, &d);
}
// memory in large pages, where the system has them: a step goes through all weights, and small pages cost it a tenth of its time
void burnish_large_pages(void* at, int64_t bytes) {
  const uintptr_t large = uintptr_t(2) << 20, from = ((uintptr_t)at + large - 1) & ~(large - 1), to = ((uintptr_t)at + bytes) & ~(large - 1);
  if (to > from) madvise((void*)from, to - from, MADV_HUGEPAGE);
}
// a page of one layer after another, of keys and of values
void burnish_copy_page(const Model* m, void* keys, void* values, int64_t num_pages, int64_t from, int64_t to) {
  int64_t size = int64_t(m->kv_heads) * PAGE * m->head_dim * (m->is_bf16 ? 2 : 4);
  for (int l = 0; l < m->layers; ++l)
    for (void* base : {keys, values}) {
      char* b = (char*)base + int64_t(l) * num_pages * size;
      memcpy(b + to * size, b + from * size, size);
    }
}
// the products alone, for measuring: each of the model's shapes once over `rows` rows
void burnish_products(const Model* m, int rows, void* work, float* logits) {
  if (m->is_bf16) products(*m, rows, (bf16*)work, logits); else products(*m, rows, (float*)work, logits);
}
}
