// Reads any bytes as npy. The bytes are refused with a sentence, or end with the array, which has the size of its
// shape.
#include <cstdlib>

#include "cli/io/npy.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto bytes = std::as_bytes(std::span(data, size));
  try {
    const auto tensor = tandem::io::parse_npy(bytes, "file");
    if (tandem::io::byte_size(tensor.shape, tensor.element) != static_cast<int64_t>(tensor.data.size())) std::abort();
    if (tensor.data.data() + tensor.data.size() != bytes.data() + size) std::abort();
  } catch (const tandem::io::InputError& error) {
    if (!std::string_view(error.what()).starts_with("file: ")) std::abort();
  }
  return 0;
}
