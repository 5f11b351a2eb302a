// Compiled once per SIMD level, each time with that level's compiler flags. Everything but the
// table has internal linkage: an inline function shared with another level could be linked in the
// version that the CPU at hand cannot run. For the same reason no standard template is used here.
#include "crc.hpp"
#include "digest.hpp"
#include "distance.hpp"
#include "interactions.hpp"
#include "kernels.hpp"
#include "lossy.hpp"
#include "packed_words.hpp"
#include "packing.hpp"
#include "pooling.hpp"
#include "quantise.hpp"

namespace planaria {

const KernelTable PLANARIA_LEVEL_TABLE = {
    PLANARIA_LEVEL_NAME,
    gather,
    scatter,
    mul_add,
    mul_add_bytes,
    combine,
    update,
    init,
    digest,
    pool,
    pool_backward,
    weight_backward,
    sum_rows,
    interact,
    interact_backward,
    find_unquantisable,
    quantise,
    dequantise,
    row_distances,
    crc32,
    span_rows,
    code_rows,
    value_rows,
    halve_rows,
    widen_rows,
    round_rows,
    pack_codes,
    unpack_codes,
    pack_words,
    pack_numbers,
    unpack_words,
    unpack_numbers,
};

}  // namespace planaria
