// The order in which the CPU kernels read a weight matrix, and the functions that write it.
//
// A matrix of `rows` outputs by `cols` inputs is cut into panels of kPanelRows rows; the last panel
// is padded with zero rows. A panel is a sequence of cache lines, one per input k; 32-bit word i of
// line k holds row i in its low half and row i + 16 in its high half, as bfloat16. One shift and
// one mask turn a line into two vectors of 16 floats, and consecutive inputs are consecutive lines:
// a matrix-vector product reads memory strictly forward.
//
// Pure functions, safe to call from several threads on disjoint rows of different panels.
#ifndef PALIMPSEST_WORKER_COMPUTE_CPU_PACKING_H_
#define PALIMPSEST_WORKER_COMPUTE_CPU_PACKING_H_

#include <cstddef>
#include <cstdint>

#include "common/bytes.h"

namespace palimpsest {

inline constexpr int64_t kPanelRows = 32;
inline constexpr int64_t kPackedLineBytes = 64;

// Number of panels of a matrix with `rows` rows.
constexpr int64_t PanelCount(int64_t rows) { return (rows + kPanelRows - 1) / kPanelRows; }

// Size of a packed matrix, a multiple of 64 bytes.
constexpr Bytes PackedMatrixBytes(int64_t rows, int64_t cols) {
  return Bytes(PanelCount(rows) * cols * kPackedLineBytes);
}

// Writes rows first_row .. first_row + row_count - 1 of a rows x cols matrix into `packed`, which
// holds PackedMatrixBytes(rows, cols) and is aligned to 64 bytes. `bf16_row_major` holds
// row_count x cols bfloat16 bit patterns. The call that includes the last row also writes the
// padding, so a matrix is complete once each row was written, in any order and in any pieces.
void PackRows(const uint16_t* bf16_row_major, int64_t first_row, int64_t row_count, int64_t rows,
              int64_t cols, std::byte* packed);

// Reads one row back as floats: the embedding lookup, and the inverse of PackRows.
void UnpackRow(const std::byte* packed, int64_t row, int64_t cols, float* out);

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_COMPUTE_CPU_PACKING_H_
