// The embedded engine's small operations on a CPU, for float and bfloat16. Compiled where the engine first runs
// (native.py), so it is built for the processor at hand. Every row is computed by itself, in an order that depends on
// nothing but the row: who shares its batch does not change a bit of it. Products and sums are fused where it says so
// and nowhere else: between the products, log-prob parity with the trainer is made of the same roundings.

#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

struct bfloat16 {
    uint16_t bits;
};

inline float widen(float value) { return value; }

inline float widen(bfloat16 value) {
    const uint32_t bits = uint32_t(value.bits) << 16;
    float wide;
    std::memcpy(&wide, &bits, sizeof wide);
    return wide;
}

template <typename T> inline T narrow(float value);

template <> inline float narrow<float>(float value) { return value; }

template <> inline bfloat16 narrow<bfloat16>(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    const uint32_t nearest_even = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
    return {uint16_t(is_nan ? 0x7fc0 : nearest_even)};
}

template <typename T> inline float rounded(float value) { return widen(narrow<T>(value)); }

// e^x to two units in the last place; written out so that loops over it become vector instructions.
inline float exponential(float x) {
    x = x < -87.0f ? -87.0f : x;
    x = x > 88.0f ? 88.0f : x;
    const float n = std::rint(x * 1.44269504f);
    const float r = std::fma(n, 2.12194440e-4f, std::fma(n, -0.693359375f, x));
    float p = 1.9875691500e-4f;
    p = std::fma(p, r, 1.3981999507e-3f);
    p = std::fma(p, r, 8.3334519073e-3f);
    p = std::fma(p, r, 4.1665795894e-2f);
    p = std::fma(p, r, 1.6666665459e-1f);
    p = std::fma(p, r, 5.0000001201e-1f);
    p = std::fma(p * r, r, r) + 1.0f;
    const uint32_t power = uint32_t(int32_t(n) + 127) << 23;
    float scale;
    std::memcpy(&scale, &power, sizeof scale);
    return p * scale;
}

// tanh(x), which saturates where the exponential does.
inline float hyperbolic_tangent(float x) { return 1.0f - 2.0f / (1.0f + exponential(2.0f * x)); }

// As transformers rounds it: normalised in float, cast, then multiplied by the weight; or, where the weight is what is
// added to 1, cast after that.
template <typename T>
inline void normalise(const T *in, const T *weight, float eps, bool unit_offset, int64_t size, T *out) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < size; i++) {
        const float value = widen(in[i]);
        sum += value * value;
    }
    const float scale = 1.0f / std::sqrt(sum / float(size) + eps);
    if (unit_offset) {
#pragma omp simd
        for (int64_t i = 0; i < size; i++)
            out[i] = narrow<T>(widen(in[i]) * scale * (1.0f + widen(weight[i])));
        return;
    }
#pragma omp simd
    for (int64_t i = 0; i < size; i++)
        out[i] = narrow<T>(rounded<T>(widen(in[i]) * scale) * widen(weight[i]));
}

template <typename T>
void add_rms_norm(T *residual, const T *delta, const T *weight, T *out, float eps, bool unit_offset, int64_t rows,
                  int64_t size) {
#pragma omp parallel for if (rows * size > 65536)
    for (int64_t row = 0; row < rows; row++) {
        T *own = residual + row * size;
        if (delta) {
            const T *added = delta + row * size;
#pragma omp simd
            for (int64_t i = 0; i < size; i++)
                own[i] = narrow<T>(widen(own[i]) + widen(added[i]));
        }
        normalise(own, weight, eps, unit_offset, size, out + row * size);
    }
}

// Both activations are x · sigmoid(u): u is x itself for SiLU, and (1 + tanh(u / 2)) / 2 is sigmoid(u) for GELU.
template <typename T, bool GELU> void gated(const T *gate_up, T *out, int64_t rows, int64_t size) {
#pragma omp parallel for if (rows * size > 16384)
    for (int64_t row = 0; row < rows; row++) {
        const T *gate = gate_up + 2 * row * size, *up = gate + size;
        T *own = out + row * size;
#pragma omp simd
        for (int64_t i = 0; i < size; i++) {
            const float value = widen(gate[i]);
            const float u = GELU ? 1.5957691216f * (value + 0.044715f * value * value * value) : value;
            own[i] = narrow<T>(rounded<T>(value / (1.0f + exponential(-u))) * widen(up[i]));
        }
    }
}

// Query and key heads: normalised where the family does that, then rotated by position; values stay as they are.
template <typename T>
void rotate(T *qkv, const T *cos, const T *sin, const T *query_norm, const T *key_norm, float eps, bool unit_offset,
            int64_t rows, int64_t heads, int64_t kv_heads, int64_t dim) {
    const int64_t half = dim / 2;
#pragma omp parallel for if (rows * (heads + kv_heads) * dim > 65536)
    for (int64_t row = 0; row < rows; row++) {
        const T *row_cos = cos + row * dim, *row_sin = sin + row * dim;
        for (int64_t head = 0; head < heads + kv_heads; head++) {
            T *own = qkv + (row * (heads + 2 * kv_heads) + head) * dim;
            const T *norm = head < heads ? query_norm : key_norm;
            if (norm)
                normalise(own, norm, eps, unit_offset, dim, own);
#pragma omp simd
            for (int64_t i = 0; i < half; i++) {
                const float first = widen(own[i]), second = widen(own[i + half]);
                const float turned = rounded<T>(first * widen(row_cos[i])) - rounded<T>(second * widen(row_sin[i]));
                own[i + half] = narrow<T>(rounded<T>(second * widen(row_cos[i + half])) +
                                          rounded<T>(first * widen(row_sin[i + half])));
                own[i] = narrow<T>(turned);
            }
        }
    }
}

constexpr int64_t MAX_SHARED = 16; // query heads that share a key/value head
constexpr int64_t MAX_DIM = 256;

// The queries of one key/value head against that head's stored keys and values. `scores` holds group × length.
template <typename T, int64_t DIM>
void attend_head(const T *query, const T *keys, const T *values, T *out, float *scores, float scaling, float softcap,
                 int64_t group, int64_t length, int64_t any_dim) {
    const int64_t dim = DIM ? DIM : any_dim;
    float scaled[MAX_SHARED][MAX_DIM], sums[MAX_SHARED][MAX_DIM], wide[MAX_DIM];
    for (int64_t g = 0; g < group; g++)
        for (int64_t i = 0; i < dim; i++) {
            scaled[g][i] = widen(query[g * dim + i]) * scaling;
            sums[g][i] = 0.0f;
        }
    for (int64_t s = 0; s < length; s++) {
        for (int64_t i = 0; i < dim; i++)
            wide[i] = widen(keys[s * dim + i]);
        for (int64_t g = 0; g < group; g++) {
            float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
            for (int64_t i = 0; i < dim; i++)
                sum = std::fma(scaled[g][i], wide[i], sum);
            scores[g * length + s] = sum;
        }
    }
    if (softcap > 0.0f) {
#pragma omp simd
        for (int64_t s = 0; s < group * length; s++)
            scores[s] = softcap * hyperbolic_tangent(scores[s] / softcap);
    }
    float total[MAX_SHARED];
    for (int64_t g = 0; g < group; g++) {
        float *own = scores + g * length, largest = own[0], sum = 0.0f;
#pragma omp simd reduction(max : largest)
        for (int64_t s = 0; s < length; s++)
            largest = own[s] > largest ? own[s] : largest;
#pragma omp simd reduction(+ : sum)
        for (int64_t s = 0; s < length; s++) {
            own[s] = exponential(own[s] - largest);
            sum += own[s];
        }
        total[g] = sum;
    }
    for (int64_t s = 0; s < length; s++) {
        for (int64_t i = 0; i < dim; i++)
            wide[i] = widen(values[s * dim + i]);
        for (int64_t g = 0; g < group; g++) {
            const float weight = scores[g * length + s];
            for (int64_t i = 0; i < dim; i++)
                sums[g][i] = std::fma(weight, wide[i], sums[g][i]);
        }
    }
    for (int64_t g = 0; g < group; g++)
        for (int64_t i = 0; i < dim; i++)
            out[g * dim + i] = narrow<T>(sums[g][i] / total[g]);
}

// One new token for each row: its key and value are stored at `position`, then its queries attend to all up to it, or
// to the last `window` of them, through a soft cap if there is one.
// A row's keys start at memory + starts[row]; its heads lie `head_strides[row]` apart, values `value_offset` further on.
template <typename T>
void decode(const T *qkv, T *memory, const int64_t *starts, const int64_t *head_strides, const int64_t *positions,
            T *out, float *scratch, float scaling, float softcap, int64_t window, int64_t value_offset, int64_t rows,
            int64_t heads, int64_t kv_heads, int64_t dim, int64_t longest) {
    const int64_t group = heads / kv_heads;
#pragma omp parallel for schedule(dynamic)
    for (int64_t task = 0; task < rows * kv_heads; task++) {
        const int64_t row = task / kv_heads, head = task % kv_heads, length = positions[row] + 1;
        const T *own = qkv + row * (heads + 2 * kv_heads) * dim;
        T *keys = memory + starts[row] + head * head_strides[row], *values = keys + value_offset;
        std::memcpy(keys + positions[row] * dim, own + (heads + head) * dim, dim * sizeof(T));
        std::memcpy(values + positions[row] * dim, own + (heads + kv_heads + head) * dim, dim * sizeof(T));
        const int64_t first = window > 0 && length > window ? length - window : 0, seen = length - first;
        keys += first * dim;
        values += first * dim;
        const T *query = own + head * group * dim;
        T *result = out + (row * heads + head * group) * dim;
        float *scores = scratch + task * group * longest;
        if (dim == 64)
            attend_head<T, 64>(query, keys, values, result, scores, scaling, softcap, group, seen, dim);
        else if (dim == 128)
            attend_head<T, 128>(query, keys, values, result, scores, scaling, softcap, group, seen, dim);
        else
            attend_head<T, 0>(query, keys, values, result, scores, scaling, softcap, group, seen, dim);
    }
}

} // namespace

#define EXPORT(T, NAME)                                                                                                \
    extern "C" void add_rms_norm_##NAME(T *residual, const T *delta, const T *weight, T *out, float eps,               \
                                        int64_t unit_offset, int64_t rows, int64_t size) {                             \
        add_rms_norm(residual, delta, weight, out, eps, unit_offset != 0, rows, size);                                 \
    }                                                                                                                  \
    extern "C" void gated_silu_##NAME(const T *gate_up, T *out, int64_t rows, int64_t size) {                          \
        gated<T, false>(gate_up, out, rows, size);                                                                     \
    }                                                                                                                  \
    extern "C" void gated_gelu_tanh_##NAME(const T *gate_up, T *out, int64_t rows, int64_t size) {                     \
        gated<T, true>(gate_up, out, rows, size);                                                                      \
    }                                                                                                                  \
    extern "C" void rotate_##NAME(T *qkv, const T *cos, const T *sin, const T *query_norm, const T *key_norm,          \
                                  float eps, int64_t unit_offset, int64_t rows, int64_t heads, int64_t kv_heads,       \
                                  int64_t dim) {                                                                       \
        rotate(qkv, cos, sin, query_norm, key_norm, eps, unit_offset != 0, rows, heads, kv_heads, dim);                \
    }                                                                                                                  \
    extern "C" void decode_##NAME(const T *qkv, T *memory, const int64_t *starts, const int64_t *head_strides,         \
                                  const int64_t *positions, T *out, float *scratch, float scaling, float softcap,      \
                                  int64_t window, int64_t value_offset, int64_t rows, int64_t heads,                   \
                                  int64_t kv_heads, int64_t dim, int64_t longest) {                                    \
        decode(qkv, memory, starts, head_strides, positions, out, scratch, scaling, softcap, window, value_offset,     \
               rows, heads, kv_heads, dim, longest);                                                                   \
    }

EXPORT(float, float32)
EXPORT(bfloat16, bfloat16)
