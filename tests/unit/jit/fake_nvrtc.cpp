// libnvrtc.so as far as tests need it. Lines of a source control its compilation:
//   //count:<file>      one byte is appended to the file
//   //sleep_ms:<n>      compiling takes n milliseconds
//   //wait_for:<file>   compiling ends when the file exists
//   //fail:<text>       compiling fails, with this in the log
//   //serialised:<n>    while at most n compilations have been counted, the log reports serialised products
#include <fcntl.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <sstream>
#include <string>
#include <thread>

#include "jit/nvrtc.h"

#define EXPORTED extern "C" __attribute__((visibility("default")))

using namespace tandem::jit;

struct tandem::jit::_nvrtcProgram {
  std::string source, log, code;
};

namespace {

bool directive(const std::string& line, const char* name, std::string* value) {
  const std::string start = std::string("//") + name;
  if (line.compare(0, start.size(), start) != 0) return false;
  *value = line.substr(start.size());
  return true;
}

nvrtcResult copy(const std::string& text, char* to) {
  std::memcpy(to, text.data(), text.size());
  return kNvrtcSuccess;
}
nvrtcResult size(const std::string& text, size_t* bytes) { return *bytes = text.size(), kNvrtcSuccess; }

}  // namespace

EXPORTED nvrtcResult nvrtcVersion(int* major, int* minor) { return *major = 13, *minor = 7, kNvrtcSuccess; }
EXPORTED nvrtcResult nvrtcGetNumSupportedArchs(int* count) { return *count = 2, kNvrtcSuccess; }
EXPORTED nvrtcResult nvrtcGetSupportedArchs(int* archs) { return archs[0] = 90, archs[1] = 100, kNvrtcSuccess; }
EXPORTED const char* nvrtcGetErrorString(nvrtcResult) { return "FAKE_ERROR"; }

EXPORTED nvrtcResult nvrtcCreateProgram(nvrtcProgram* program, const char* source, const char* name, int header_count,
                                        const char* const* headers, const char* const* names) {
  *program = new _nvrtcProgram{source, "", std::string("compiled ") + name};
  for (int i = 0; i < header_count; ++i) (*program)->code += std::string(" ") + names[i] + "=" + headers[i];
  return kNvrtcSuccess;
}
EXPORTED nvrtcResult nvrtcDestroyProgram(nvrtcProgram* program) {
  return delete *program, *program = nullptr, kNvrtcSuccess;
}

EXPORTED nvrtcResult nvrtcCompileProgram(nvrtcProgram program, int count, const char* const* options) {
  for (int i = 0; i < count; ++i) program->code += std::string(" ") + options[i];
  std::istringstream lines(program->source);
  nvrtcResult result = kNvrtcSuccess;
  off_t counted = 0;
  for (std::string line, value; std::getline(lines, line);) {
    if (directive(line, "count:", &value)) {
      const int file = open(value.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
      if (write(file, ".", 1) != 1) result = kNvrtcInvalidOption;
      counted = lseek(file, 0, SEEK_CUR);
      close(file);
    } else if (directive(line, "serialised:", &value)) {
      if (counted <= std::stoi(value)) {
        program->log =
            "ptxas info    : (C7511) Potential Performance Loss: wgmma.mma_async instructions are serialized due to";
        program->log += '\0';
      }
    } else if (directive(line, "sleep_ms:", &value)) {
      std::this_thread::sleep_for(std::chrono::milliseconds(std::stoi(value)));
    } else if (directive(line, "wait_for:", &value)) {
      while (access(value.c_str(), F_OK) != 0) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    } else if (directive(line, "fail:", &value)) {
      program->log = "a warning\n" + value + "\nmore\n";
      program->log += '\0';
      result = kNvrtcCompilation;
    }
  }
  return result;
}

EXPORTED nvrtcResult nvrtcGetProgramLogSize(nvrtcProgram program, size_t* bytes) { return size(program->log, bytes); }
EXPORTED nvrtcResult nvrtcGetProgramLog(nvrtcProgram program, char* log) { return copy(program->log, log); }
EXPORTED nvrtcResult nvrtcGetCUBINSize(nvrtcProgram program, size_t* bytes) { return size(program->code, bytes); }
EXPORTED nvrtcResult nvrtcGetCUBIN(nvrtcProgram program, char* cubin) { return copy(program->code, cubin); }
EXPORTED nvrtcResult nvrtcGetPTXSize(nvrtcProgram program, size_t* bytes) {
  return *bytes = program->code.size() + 1, kNvrtcSuccess;
}
EXPORTED nvrtcResult nvrtcGetPTX(nvrtcProgram program, char* ptx) {
  std::memcpy(ptx, program->code.c_str(), program->code.size() + 1);
  return kNvrtcSuccess;
}
