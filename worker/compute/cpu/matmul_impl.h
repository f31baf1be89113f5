// Matrix products, norm, rotation and conversions. Included once per instruction set, after
// PALIMPSEST_ISA and its simd header; uses no inline function of the standard library, because a
// copy compiled here might be linked into code that runs on lesser machines.

namespace palimpsest::PALIMPSEST_ISA {

// How far ahead weights are prefetched, in lines.
inline constexpr int64_t kPrefetchLines = 24;
inline constexpr int kLineFloats = 32;
inline constexpr int kGroupPanels = 4;

template <int P>
inline constexpr int kMaxTokens = kAccumulators / (2 * P);

PALIMPSEST_INLINE int64_t Smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// e^x within 2 ulp; 0 below -87.3, finite above 88. Reduction by a two-part ln 2 and the minimax
// polynomial of Cephes' expf (Moshier, https://www.netlib.org/cephes).
PALIMPSEST_INLINE F32x16 Exp(F32x16 x) {
  const F32x16 magic = Broadcast(12582912.0f);  // 1.5 * 2^23: rounds to an integer when added
  const F32x16 clamped = Max(Broadcast(-87.3f), Min(Broadcast(88.0f), x));
  const F32x16 shifted = Fma(clamped, Broadcast(1.44269504f), magic);
  const F32x16 n = Sub(shifted, magic);
  F32x16 r = Fma(n, Broadcast(-0.693359375f), clamped);
  r = Fma(n, Broadcast(2.12194440e-4f), r);
  F32x16 p = Broadcast(1.9875691500e-4f);
  p = Fma(p, r, Broadcast(1.3981999507e-3f));
  p = Fma(p, r, Broadcast(8.3334519073e-3f));
  p = Fma(p, r, Broadcast(4.1665795894e-2f));
  p = Fma(p, r, Broadcast(1.6666665459e-1f));
  p = Fma(p, r, Broadcast(5.0000001201e-1f));
  p = Fma(Mul(p, r), r, Add(r, Broadcast(1.0f)));
  return SelectLess(x, Broadcast(-87.3f), Zero(), AddExponent(p, shifted));
}

PALIMPSEST_INLINE F32x16 SiLU(F32x16 x) {
  return Div(x, Add(Broadcast(1.0f), Exp(Sub(Zero(), x))));
}

// One chain of fused multiply-adds over k per output element: P panels by T tokens. Writes
// out[p][t][32].
template <int P, int T>
static void Micro(const std::byte* const* panels, const Projection& m, const float* x, float* out) {
  F32x16 acc[P][T][2];
#pragma GCC unroll 16
  for (int p = 0; p < P; ++p) {
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t) acc[p][t][0] = acc[p][t][1] = Zero();
  }
  const std::byte* line[P];
#pragma GCC unroll 16
  for (int p = 0; p < P; ++p) line[p] = panels[p];
  const int64_t stride = m.input_stride;
  for (const float* end = x + m.cols; x != end; ++x) {
    F32x16 w[P][2];
#pragma GCC unroll 16
    for (int p = 0; p < P; ++p) {
      LoadLine(line[p], w[p][0], w[p][1]);
      Prefetch(line[p] + kPrefetchLines * kPackedLineBytes);
      line[p] += kPackedLineBytes;
    }
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t) {
      const F32x16 b = Broadcast(x[t * stride]);
#pragma GCC unroll 16
      for (int p = 0; p < P; ++p) {
        acc[p][t][0] = Fma(w[p][0], b, acc[p][t][0]);
        acc[p][t][1] = Fma(w[p][1], b, acc[p][t][1]);
      }
    }
  }
#pragma GCC unroll 16
  for (int p = 0; p < P; ++p) {
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t) {
      Store(out + (p * T + t) * kLineFloats, acc[p][t][0]);
      Store(out + (p * T + t) * kLineFloats + 16, acc[p][t][1]);
    }
  }
}

// Calls Micro<P, tokens>.
template <int P, int T = 1>
static void MicroFor(int64_t tokens, const std::byte* const* panels, const Projection& m,
                     const float* x, float* out) {
  if constexpr (T < kMaxTokens<P>) {
    if (tokens > T) return MicroFor<P, T + 1>(tokens, panels, m, x, out);
  }
  Micro<P, T>(panels, m, x, out);
}

// All panels of a group for one tile of tokens, with the largest micro-kernels that fit.
static void MultiplyGroup(const std::byte* const* panels, int count, int64_t tokens,
                          const Projection& m, const float* x, float* out) {
  int p = 0;
  while (p < count) {
    float* to = out + p * tokens * kLineFloats;
    if (kMaxTokens < 4 >> 0 && count - p >= 4 && tokens <= kMaxTokens<4>) {
      MicroFor<4>(tokens, panels + p, m, x, to);
      p += 4;
    } else if (kMaxTokens<2> > 0 && count - p >= 2 && tokens <= kMaxTokens<2>) {
      MicroFor<2>(tokens, panels + p, m, x, to);
      p += 2;
    } else {
      MicroFor<1>(tokens, panels + p, m, x, to);
      p += 1;
    }
  }
}

enum class Epilogue { kStore, kAdd };

// Moves the products of one panel, [tokens][32], to rows first_row .. of the output.
template <Epilogue E>
static void Finish(const Projection& m, int64_t first_row, const float* products, int64_t tokens,
                   float* output) {
  const int64_t count = Smaller(kPanelRows, m.rows - first_row);
  for (int64_t t = 0; t < tokens; ++t, products += kLineFloats, output += m.output_stride) {
    float* to = output + first_row;
    if (count == kPanelRows) {
      for (int i = 0; i < kPanelRows; i += 16) {
        F32x16 y = Load(products + i);
        if (m.bias != nullptr) y = Add(y, Load(m.bias + first_row + i));
        if (E == Epilogue::kAdd) y = Add(Load(to + i), y);
        Store(to + i, y);
      }
    } else {
      for (int64_t i = 0; i < count; ++i) {
        float y = products[i];
        if (m.bias != nullptr) y = y + m.bias[first_row + i];
        to[i] = E == Epilogue::kAdd ? to[i] + y : y;
      }
    }
  }
}

// Gate and up products of one unit, [2][tokens][32].
static void FinishGated(const Projection& m, int64_t first_row, const float* products,
                        int64_t tokens, float* output) {
  const float* gate_bias = m.bias == nullptr ? nullptr : m.bias + first_row;
  const float* up_bias = m.bias == nullptr ? nullptr : gate_bias + m.rows / 2;
  const float* ups = products + tokens * kLineFloats;
  for (int64_t t = 0; t < tokens; ++t, products += kLineFloats, ups += kLineFloats) {
    for (int i = 0; i < kPanelRows; i += 16) {
      F32x16 gate = Load(products + i), up = Load(ups + i);
      if (m.bias != nullptr) {
        gate = Add(gate, Load(gate_bias + i));
        up = Add(up, Load(up_bias + i));
      }
      Store(output + t * m.output_stride + first_row + i, Mul(SiLU(gate), up));
    }
  }
}

// Tokens per tile: as many as the largest micro-kernel takes where one tile is enough, so that each
// weight is read once; else tiles of equal size for the two-panel kernel.
static int64_t TileTokens(int64_t tokens) {
  if (tokens <= kMaxTokens<1>) return tokens;
  const int64_t most = kMaxTokens<2> > 1 ? kMaxTokens<2> : kMaxTokens<1>;
  const int64_t tiles = (tokens + most - 1) / most;
  return (tokens + tiles - 1) / tiles;
}

template <typename FinishUnit>
PALIMPSEST_INLINE void ForTiles(const Projection& m, int64_t first, int64_t last, int parts,
                                int64_t part_bytes, FinishUnit finish) {
  const int64_t panel_bytes = m.cols * kPackedLineBytes;
  const int64_t tile = TileTokens(m.tokens);
  const int group = (tile <= kMaxTokens<4> ? 4 : 2) / parts;
  alignas(64) float products[kAccumulators * 16 * 4];
  for (int64_t unit = first; unit < last; unit += group) {
    const int units = static_cast<int>(Smaller(group, last - unit));
    const std::byte* panels[kGroupPanels];
    for (int u = 0; u < units; ++u) {
      for (int part = 0; part < parts; ++part) {
        panels[u * parts + part] = m.weights + (unit + u) * panel_bytes + part * part_bytes;
      }
    }
    for (int64_t t = 0; t < m.tokens; t += tile) {
      const int64_t tokens = Smaller(tile, m.tokens - t);
      MultiplyGroup(panels, units * parts, tokens, m, m.input + t * m.input_stride, products);
      for (int u = 0; u < units; ++u) {
        finish((unit + u) * kPanelRows, products + u * parts * tokens * kLineFloats, tokens,
               m.output + t * m.output_stride);
      }
    }
  }
}

static void Project(const Projection& m, int64_t first, int64_t last) {
  ForTiles(m, first, last, 1, 0, [&m](int64_t row, const float* products, int64_t n, float* out) {
    Finish<Epilogue::kStore>(m, row, products, n, out);
  });
}

static void ProjectAdd(const Projection& m, int64_t first, int64_t last) {
  ForTiles(m, first, last, 1, 0, [&m](int64_t row, const float* products, int64_t n, float* out) {
    Finish<Epilogue::kAdd>(m, row, products, n, out);
  });
}

static void ProjectGated(const Projection& m, int64_t first, int64_t last) {
  const int64_t up_bytes = m.rows / 2 * m.cols * 2;
  ForTiles(m, first, last, 2, up_bytes,
           [&m](int64_t row, const float* products, int64_t n, float* out) {
             FinishGated(m, row, products, n, out);
           });
}

static void RmsNorm(const float* x, const float* weight, int64_t size, float epsilon, float* out) {
  F32x16 even = Zero(), odd = Zero();
  int64_t i = 0;
  for (; i + 32 <= size; i += 32) {
    const F32x16 a = Load(x + i), b = Load(x + i + 16);
    even = Fma(a, a, even);
    odd = Fma(b, b, odd);
  }
  if (i < size) {
    const F32x16 a = Load(x + i);
    even = Fma(a, a, even);
  }
  const float mean = ReduceAdd(Add(even, odd)) / static_cast<float>(size);
  const F32x16 scale = Broadcast(1.0f / __builtin_sqrtf(mean + epsilon));
  for (i = 0; i < size; i += 16) {
    Store(out + i, Mul(Load(weight + i), Mul(Load(x + i), scale)));
  }
}

static void Rotate(float* head, const float* cosines, const float* sines, int64_t half) {
  for (int64_t i = 0; i < half; ++i) {
    const float a = head[i], b = head[half + i];
    head[i] = a * cosines[i] - b * sines[i];
    head[half + i] = b * cosines[i] + a * sines[i];
  }
}

static void ToBf16(const float* in, int64_t size, uint16_t* out) {
  for (int64_t i = 0; i < size; ++i) {
    const uint32_t bits = __builtin_bit_cast(uint32_t, in[i]);
    const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
    const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
    out[i] = static_cast<uint16_t>(nan ? bits >> 16 | 0x40u : rounded);
  }
}

static void Exponential(const float* x, int64_t size, float* out) {
  for (int64_t i = 0; i < size; i += 16) Store(out + i, Exp(Load(x + i)));
}

}  // namespace palimpsest::PALIMPSEST_ISA
