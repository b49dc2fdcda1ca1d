// .npy, versions 1 to 3: a magic string, a header that is a Python dictionary, one array's bytes.
//
// {'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }
#pragma once

#include <span>
#include <string>

#include "cli/io/tensor.h"

namespace tandem::io {

// Returns the single array of a file, without a name. The view points into bytes. Throws InputError for big-endian and
// Fortran-ordered arrays, for types other than numbers and booleans, and for sizes that do not agree.
FileTensor parse_npy(std::span<const std::byte> bytes, const std::string& file);

// Writes version 1. Replaces path after all bytes are written. bf16 becomes '<V2', the type that numpy writes for
// ml_dtypes.
void write_npy(const std::string& path, const FileTensor& tensor);

}  // namespace tandem::io
