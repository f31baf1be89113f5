// Matrix products, norm, rotation and conversions. Included once per instruction set, after
// PALIMPSEST_ISA and its simd header; uses no inline function of the standard library, because a
// copy compiled here might be linked into code that runs on lesser machines.

namespace palimpsest::PALIMPSEST_ISA {

// How far ahead weights are prefetched, in lines; past a panel's end that is the next panel.
inline constexpr int64_t kPrefetchLines = 64;
inline constexpr int kLineFloats = 32;

// Most tokens of one micro-kernel: two accumulators per token.
inline constexpr int kTileTokens = kAccumulators / 2;

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

// Gaussian error linear unit in its tanh form, x (1 + tanh(u)) / 2 = x / (1 + e^-2u) with
// u = sqrt(2 / pi) (x + 0.044715 x^3) (Hendrycks, Gimpel, arXiv:1606.08415).
PALIMPSEST_INLINE F32x16 GeluTanh(F32x16 x) {
  const F32x16 cubic = Fma(Mul(Mul(x, x), x), Broadcast(0.044715f), x);
  return Div(x, Add(Broadcast(1.0f), Exp(Mul(cubic, Broadcast(-1.59576912f)))));
}

// cap * tanh(x / cap), with tanh(y) = 1 - 2 / (e^2y + 1).
PALIMPSEST_INLINE F32x16 SoftCapped(F32x16 x, F32x16 cap, F32x16 twice_inverse) {
  const F32x16 grown = Add(Exp(Mul(x, twice_inverse)), Broadcast(1.0f));
  return Mul(cap, Sub(Broadcast(1.0f), Div(Broadcast(2.0f), grown)));
}

// One chain of fused multiply-adds over k per output element, for one panel and T tokens. Writes
// out[t][32].
template <int T>
static void Micro(const std::byte* line, const Projection& m, const float* x, float* out) {
  F32x16 low[T], high[T];
#pragma GCC unroll 16
  for (int t = 0; t < T; ++t) low[t] = high[t] = Zero();
  const int64_t stride = m.input_stride;
  for (const float* end = x + m.cols; x != end; ++x, line += kPackedLineBytes) {
    F32x16 w_low, w_high;
    LoadLine(line, w_low, w_high);
    Prefetch(line + kPrefetchLines * kPackedLineBytes);
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t) {
      const F32x16 b = Broadcast(x[t * stride]);
      low[t] = Fma(w_low, b, low[t]);
      high[t] = Fma(w_high, b, high[t]);
    }
  }
#pragma GCC unroll 16
  for (int t = 0; t < T; ++t) {
    Store(out + t * kLineFloats, low[t]);
    Store(out + t * kLineFloats + 16, high[t]);
  }
}

// Calls Micro<tokens>.
template <int T = 1>
static void MicroFor(int64_t tokens, const std::byte* panel, const Projection& m, const float* x,
                     float* out) {
  if constexpr (T < kTileTokens) {
    if (tokens > T) return MicroFor<T + 1>(tokens, panel, m, x, out);
  }
  Micro<T>(panel, m, x, out);
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
        if (m.nonlinearity == Nonlinearity::kRelu) y = Max(y, Zero());
        if (E == Epilogue::kAdd) y = Add(Load(to + i), y);
        Store(to + i, y);
      }
    } else {
      for (int64_t i = 0; i < count; ++i) {
        float y = products[i];
        if (m.bias != nullptr) y = y + m.bias[first_row + i];
        if (m.nonlinearity == Nonlinearity::kRelu) y = y > 0 ? y : 0;
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
  const bool gelu = m.nonlinearity == Nonlinearity::kGeluTanh;
  for (int64_t t = 0; t < tokens; ++t, products += kLineFloats, ups += kLineFloats) {
    for (int i = 0; i < kPanelRows; i += 16) {
      F32x16 gate = Load(products + i), up = Load(ups + i);
      if (m.bias != nullptr) {
        gate = Add(gate, Load(gate_bias + i));
        up = Add(up, Load(up_bias + i));
      }
      Store(output + t * m.output_stride + first_row + i,
            Mul(gelu ? GeluTanh(gate) : SiLU(gate), up));
    }
  }
}

// Tiles of nearly equal size, as few as the micro-kernels allow.
static int64_t TileTokens(int64_t tokens) {
  const int64_t tiles = (tokens + kTileTokens - 1) / kTileTokens;
  return (tokens + tiles - 1) / tiles;
}

template <Epilogue E>
static void ProjectWith(const Projection& m, int64_t first, int64_t last) {
  const int64_t tile = TileTokens(m.tokens);
  alignas(64) float products[kTileTokens * kLineFloats];
  for (int64_t unit = first; unit < last; ++unit) {
    const std::byte* panel = m.weights + unit * m.cols * kPackedLineBytes;
    for (int64_t t = 0; t < m.tokens; t += tile) {
      const int64_t tokens = Smaller(tile, m.tokens - t);
      MicroFor(tokens, panel, m, m.input + t * m.input_stride, products);
      Finish<E>(m, unit * kPanelRows, products, tokens, m.output + t * m.output_stride);
    }
  }
}

static void Project(const Projection& m, int64_t first, int64_t last) {
  ProjectWith<Epilogue::kStore>(m, first, last);
}

static void ProjectAdd(const Projection& m, int64_t first, int64_t last) {
  ProjectWith<Epilogue::kAdd>(m, first, last);
}

static void ProjectGated(const Projection& m, int64_t first, int64_t last) {
  const int64_t tile = TileTokens(m.tokens);
  alignas(64) float products[2 * kTileTokens * kLineFloats];
  for (int64_t unit = first; unit < last; ++unit) {
    const std::byte* gate = m.weights + unit * m.cols * kPackedLineBytes;
    const std::byte* up = gate + m.rows / 2 * m.cols * 2;
    for (int64_t t = 0; t < m.tokens; t += tile) {
      const int64_t tokens = Smaller(tile, m.tokens - t);
      const float* x = m.input + t * m.input_stride;
      MicroFor(tokens, gate, m, x, products);
      MicroFor(tokens, up, m, x, products + tokens * kLineFloats);
      FinishGated(m, unit * kPanelRows, products, tokens, m.output + t * m.output_stride);
    }
  }
}

// One of a row's reductions: the sum over i of (x[i] - middle)^2, or of x[i].
template <bool kSquares>
static float SumOf(const float* x, int64_t size, float middle) {
  const F32x16 shift = Broadcast(middle);
  F32x16 even = Zero(), odd = Zero();
  int64_t i = 0;
  const auto add = [&](F32x16 & sum, const float* at) __attribute__((always_inline)) {
    F32x16 a = Load(at);
    if (kSquares) a = Sub(a, shift);
    sum = kSquares ? Fma(a, a, sum) : Add(sum, a);
  };
  for (; i + 32 <= size; i += 32) {
    add(even, x + i);
    add(odd, x + i + 16);
  }
  if (i < size) add(even, x + i);
  return ReduceAdd(Add(even, odd));
}

static void RmsNorm(const float* x, const float* weight, int64_t size, float epsilon, float offset,
                    float* out) {
  const float mean = SumOf<true>(x, size, 0.0f) / static_cast<float>(size);
  const F32x16 scale = Broadcast(1.0f / __builtin_sqrtf(mean + epsilon));
  const F32x16 shift = Broadcast(offset);
  for (int64_t i = 0; i < size; i += 16) {
    Store(out + i, Mul(Add(shift, Load(weight + i)), Mul(Load(x + i), scale)));
  }
}

static void LayerNorm(const float* x, const float* weight, const float* bias, int64_t size,
                      float epsilon, float* out) {
  const float mean = SumOf<false>(x, size, 0.0f) / static_cast<float>(size);
  const float variance = SumOf<true>(x, size, mean) / static_cast<float>(size);
  const F32x16 scale = Broadcast(1.0f / __builtin_sqrtf(variance + epsilon));
  const F32x16 shift = Broadcast(mean);
  for (int64_t i = 0; i < size; i += 16) {
    const F32x16 centered = Mul(Sub(Load(x + i), shift), scale);
    Store(out + i, Fma(centered, Load(weight + i), Load(bias + i)));
  }
}

static void SoftCap(float* x, int64_t size, float cap) {
  const F32x16 limit = Broadcast(cap), twice_inverse = Broadcast(2.0f / cap);
  for (int64_t i = 0; i < size; i += 16)
    Store(x + i, SoftCapped(Load(x + i), limit, twice_inverse));
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
