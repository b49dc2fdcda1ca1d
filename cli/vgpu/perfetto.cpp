#include "cli/vgpu/perfetto.h"

#include <cstdio>

#include "base/text.h"

namespace tandem::tool {
namespace {

using vgpu::Activity;

std::string json_text(std::string_view text) {
  std::string result = "\"";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      (result += '\\') += c;
    } else if (byte < 0x20) {
      char escape[8];
      std::snprintf(escape, sizeof escape, "\\u%04x", byte);
      result += escape;
    } else {
      result += c;
    }
  }
  return result += '"';
}

const char* category_of(Activity activity) {
  switch (activity) {
    case Activity::compute: return "compute";
    case Activity::wait: return "wait";
    case Activity::copy: return "copy";
    case Activity::matrix: return "matrix";
  }
  return "";
}

class Writer {
 public:
  // fields: all fields of an event except its process.
  template <class... Parts>
  void event(const Parts&... fields) {
    text_ += first_ ? "" : ",\n";
    first_ = false;
    text_ += str_cat("{\"pid\":0,", fields..., "}");
  }
  std::string finish(const std::string& title) {
    return str_cat("{\"displayTimeUnit\":\"ns\",\"otherData\":{\"title\":", json_text(title), "},\"traceEvents\":[\n",
                   text_, "\n]}\n");
  }

 private:
  std::string text_;
  bool first_ = true;
};

}  // namespace

std::string perfetto_json(const vgpu::Timeline& t) {
  Writer writer;
  writer.event("\"ph\":\"M\",\"name\":\"process_name\",\"args\":{\"name\":", json_text(t.title), "}");
  for (size_t row = 0; row < t.rows.size(); ++row) {
    writer.event("\"ph\":\"M\",\"tid\":", row, ",\"name\":\"thread_name\",\"args\":{\"name\":", json_text(t.rows[row]),
                 "}");
    writer.event("\"ph\":\"M\",\"tid\":", row, ",\"name\":\"thread_sort_index\",\"args\":{\"sort_index\":", row, "}");
  }
  for (const vgpu::Slice& s : t.slices) {
    const std::string place = s.instruction < 0 ? "" : t.places[static_cast<size_t>(s.instruction)];
    writer.event("\"ph\":\"X\",\"tid\":", s.row, ",\"ts\":", s.begin, ",\"dur\":", s.end - s.begin,
                 ",\"name\":", json_text(t.names[static_cast<size_t>(s.name)]), ",\"cat\":\"", category_of(s.activity),
                 "\"", place.empty() ? "" : str_cat(",\"args\":{\"place\":", json_text(place), "}"));
  }
  for (size_t n = 0; n < t.arrows.size(); ++n) {
    const vgpu::Arrow& a = t.arrows[n];
    const std::string common = str_cat(",\"id\":", n, ",\"cat\":\"arrival\",\"name\":\"arrival\"");
    writer.event("\"ph\":\"s\",\"tid\":", a.from_row, ",\"ts\":", a.from, common);
    writer.event("\"ph\":\"f\",\"bp\":\"e\",\"tid\":", a.to_row, ",\"ts\":", a.to, common);
  }
  return writer.finish(t.title);
}

}  // namespace tandem::tool
