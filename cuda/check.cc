#include "cuda/check.h"

#include "cuda/seal.h"

namespace bsjax {

std::string Show(Dims dims) {
  std::string text = "(";
  for (size_t i = 0; i < dims.size(); ++i) text += (i ? ", " : "") + std::to_string(dims[i]);
  return text + ")";
}

ffi::Error Refuse(const char* op, const std::string& what) {
  return ffi::Error::InvalidArgument(std::string(op) + ": " + what + ".");
}

bool Serves(int64_t block_size) {
  return block_size == 8 || block_size == 16 || block_size == 32 || block_size == 64 || block_size == 128;
}

ffi::Error ToDType(const char* op, ffi::DataType type, DType* dtype) {
  switch (type) {
    case ffi::DataType::F32:
      *dtype = DType::kF32;
      return ffi::Error::Success();
    case ffi::DataType::F16:
      *dtype = DType::kF16;
      return ffi::Error::Success();
    case ffi::DataType::BF16:
      *dtype = DType::kBF16;
      return ffi::Error::Success();
    default:
      return Refuse(op, "operands must be float32, float16 or bfloat16; got XLA element type " +
                            std::to_string(static_cast<int>(type)));
  }
}

ffi::Error CheckIndices(const char* op, const char* name, const ffi::AnyBuffer& buffer) {
  if (buffer.element_type() != ffi::DataType::S32) return Refuse(op, std::string(name) + " must be int32");
  if (buffer.dimensions().size() != 1) {
    return Refuse(op, std::string(name) + " must have 1 dimension; got " + Show(buffer.dimensions()));
  }
  return ffi::Error::Success();
}

ffi::Error CheckSchedule(const char* op, const ffi::AnyBuffer& schedule, int64_t size, bool* has_body) {
  BSJAX_RETURN_IF_ERROR(CheckIndices(op, "schedule", schedule));
  const int64_t words = static_cast<int64_t>(schedule.element_count());
  *has_body = size > 0 && words == kScheduleHeaderWords + size;
  if (*has_body || words == kScheduleHeaderWords) return ffi::Error::Success();
  return Refuse(op, "schedule must have " + std::to_string(kScheduleHeaderWords) + " words (none) or the " +
                        std::to_string(kScheduleHeaderWords + size) + " of a layout of these sizes; got " +
                        std::to_string(words));
}

int64_t Product(Dims dims, size_t begin, size_t end) {
  int64_t product = 1;
  for (size_t i = begin; i < end; ++i) product *= dims[i];
  return product;
}

bool SameRows(Dims a, Dims b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 1; i + 1 < a.size(); ++i) {
    if (a[i] != b[i]) return false;
  }
  return true;
}

bool JoinGroups(int64_t ours, int64_t* groups) {
  if (ours == *groups || ours == 1) return true;
  if (*groups != 1) return false;
  *groups = ours;
  return true;
}

ffi::Error CheckSeal(const char* op, const int32_t* seal) {
  if (*seal == kSeal) return ffi::Error::Success();
  return Refuse(
      op,
      "the layout's arrays were changed (its seal is broken), by arithmetic on a whole training state perhaps: "
      "map over nnx.Param only, or leave integer leaves alone");
}

}  // namespace bsjax
