// The folder of the library or program that contains this code.
#pragma once

#include <filesystem>

namespace tandem {

// Symbolic links are resolved. The result is empty if the system does not know the folder.
std::filesystem::path own_folder();

}  // namespace tandem
