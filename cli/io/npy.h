// .npy, versions 1 to 3: a magic string, a header that is a Python dictionary, one array's bytes.
//
// {'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }
#pragma once

#include <span>
#include <string>

#include "cli/io/tensor.h"

namespace tandem::io {

// The one array of a file, nameless; the view points into bytes. Refuses, with an InputError, big-endian and
// Fortran-ordered arrays, structured and other types than numbers and booleans, and sizes that do not agree.
FileTensor parse_npy(std::span<const std::byte> bytes, const std::string& file);

// Version 1. Replaces path when all has been written. bf16 becomes '<V2', as ml_dtypes has numpy write it.
void write_npy(const std::string& path, const FileTensor& tensor);

}  // namespace tandem::io
