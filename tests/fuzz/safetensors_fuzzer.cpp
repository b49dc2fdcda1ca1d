// Reads any bytes as safetensors: they are refused with a sentence, or tensors lie inside them and cover all data.
#include <cstdlib>

#include "cli/io/safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto bytes = std::as_bytes(std::span(data, size));
  try {
    const auto file = tandem::io::parse_safetensors(bytes, "file");
    const std::byte* at = nullptr;
    for (const auto& tensor : file.tensors) {
      if (at && tensor.data.data() != at) std::abort();
      if (tensor.data.data() < bytes.data() + 8) std::abort();
      at = tensor.data.data() + tensor.data.size();
      if (tandem::io::byte_size(tensor.shape, tensor.element) != static_cast<int64_t>(tensor.data.size())) std::abort();
      if (!file.find(tensor.name)) std::abort();
    }
    if (at && at != bytes.data() + size) std::abort();
  } catch (const tandem::io::InputError& error) {
    if (!std::string_view(error.what()).starts_with("file: ")) std::abort();
  }
  return 0;
}
