#include "cuda/spmm/check.h"

#include "cuda/seal.h"
#include "cuda/spmm/schedule.h"

namespace bsjax {

ffi::Error CheckSpmm(const ffi::AnyBuffer& x, const ffi::AnyBuffer& blocks, const ffi::AnyBuffer& indptr,
                     const ffi::AnyBuffer& indices, const ffi::AnyBuffer& block_ids, const ffi::AnyBuffer& schedule,
                     ffi::AnyBuffer& y, bool transpose, bool tf32, SpmmArgs* args) {
  const char* op = "bsjax_spmm";
  BSJAX_RETURN_IF_ERROR(ToDType(op, x.element_type(), &args->dtype));
  if (blocks.element_type() != x.element_type() || y.element_type() != x.element_type()) {
    return Refuse(op, "x, blocks and y must have one dtype");
  }
  BSJAX_RETURN_IF_ERROR(CheckIndices(op, "indptr", indptr));
  BSJAX_RETURN_IF_ERROR(CheckIndices(op, "indices", indices));
  BSJAX_RETURN_IF_ERROR(CheckIndices(op, "block_ids", block_ids));
  const Dims xd = x.dimensions(), wd = blocks.dimensions(), yd = y.dimensions();
  if (xd.size() < 2 || wd.size() != 4 || yd.size() < 2) {
    return Refuse(op, "x and y must be [g, ..., features] and blocks must have 4 dimensions; got " + Show(xd) + ", " +
                          Show(yd) + " and " + Show(wd));
  }
  const int64_t k = xd[xd.size() - 1], n = yd[yd.size() - 1], m = Product(xd, 1, xd.size() - 1);
  const int64_t b = wd[3];
  if (wd[2] != b || !Serves(b)) {
    return Refuse(op, "blocks must be square with side 8, 16, 32, 64 or 128; got " + Show(wd));
  }
  int64_t groups = 1;
  if (!JoinGroups(xd[0], &groups) || !JoinGroups(wd[0], &groups) || yd[0] != groups) {
    return Refuse(op,
                  "the groups of x, blocks and y must agree; got " + Show(xd) + ", " + Show(wd) + " and " + Show(yd));
  }
  const int64_t lists = static_cast<int64_t>(indptr.element_count());
  if (!SameRows(xd, yd) || k % b != 0 || n != (lists - 1) * b) {
    return Refuse(op, "x " + Show(xd) + ", y " + Show(yd) + " and indptr " + Show(indptr.dimensions()) +
                          " do not fit blocks of side " + std::to_string(b));
  }
  if (static_cast<int64_t>(indices.element_count()) != wd[1] ||
      static_cast<int64_t>(block_ids.element_count()) != wd[1]) {
    return Refuse(op, "indices and block_ids must have one entry a block of " + Show(wd));
  }
  args->x = x.untyped_data();
  args->blocks = blocks.untyped_data();
  args->indptr = static_cast<const int32_t*>(indptr.untyped_data());
  args->indices = static_cast<const int32_t*>(indices.untyped_data());
  args->block_ids = static_cast<const int32_t*>(block_ids.untyped_data());
  bool has_schedule = false;
  const int64_t schedule_size = SpmmSchedule::Serves(b) ? SpmmSchedule(k, n, b, wd[1]).size : 0;
  BSJAX_RETURN_IF_ERROR(CheckSchedule(op, schedule, schedule_size, &has_schedule));
  args->seal = static_cast<const int32_t*>(schedule.untyped_data());
  args->schedule = has_schedule ? args->seal + kScheduleHeaderWords : nullptr;
  args->y = y.untyped_data();
  args->num_groups = groups;
  args->m = m;
  args->k = k;
  args->n = n;
  args->x_group_stride = xd[0] == 1 ? 0 : m * k;
  args->num_blocks = wd[1];
  args->blocks_group_stride = wd[0] == 1 ? 0 : wd[1] * b * b;
  args->block_size = static_cast<int32_t>(b);
  args->transpose = transpose;
  args->tf32 = tf32;
  return ffi::Error::Success();
}

}  // namespace bsjax
