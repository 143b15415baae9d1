#include "runner/json.h"

#include <charconv>
#include <cmath>
#include <cstdlib>

#include "runner/fault.h"

namespace liteboost::runner {
namespace {

constexpr int kDeepest = 32;
constexpr const char* kAgain = "; export the model again";

void append_utf8(std::string& to, uint32_t code) {
  if (code < 0x80) {
    to += static_cast<char>(code);
    return;
  }
  const int more = code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
  constexpr unsigned char kFirst[] = {0, 0xC0, 0xE0, 0xF0};
  to += static_cast<char>(kFirst[more] | (code >> (6 * more)));
  for (int at = more - 1; at >= 0; --at) to += static_cast<char>(0x80 | ((code >> (6 * at)) & 0x3F));
}

}  // namespace

class JsonReader {
 public:
  JsonReader(std::string_view text, const std::string& file) : text_(text), file_(file) {}

  Json whole() {
    Json found = value(file_, 0);
    space();
    check(at_ == text_.size(), "something behind its end");
    return found;
  }

 private:
  void check(bool condition, const char* what) const {
    require(condition, LITEBOOST_BAD_FOLDER, file_, " is no JSON: ", what, " at byte ", at_, kAgain);
  }
  void space() {
    while (at_ < text_.size() && std::string_view(" \t\r\n").find(text_[at_]) != std::string_view::npos)
      ++at_;
  }
  char peek() {
    space();
    check(at_ < text_.size(), "it ends too early");
    return text_[at_];
  }
  bool take(char wanted) {
    if (peek() != wanted) return false;
    ++at_;
    return true;
  }
  bool take(std::string_view word) {
    if (text_.substr(at_, word.size()) != word) return false;
    at_ += word.size();
    return true;
  }

  Json value(const std::string& where, int depth) {
    check(depth < kDeepest, "it is nested too deep");
    Json made;
    made.where_ = where;
    const char first = peek();
    if (first == '{') {
      made.kind_ = Json::Kind::object;
      object(made, depth);
    } else if (first == '[') {
      made.kind_ = Json::Kind::list;
      list(made, depth);
    } else if (first == '"') {
      made.kind_ = Json::Kind::text;
      made.text_ = text();
    } else if (take("true") || take("false")) {
      made.kind_ = Json::Kind::boolean;
      made.boolean_ = first == 't';
    } else if (!take("null")) {
      made.kind_ = Json::Kind::number;
      const size_t start = at_;
      while (at_ < text_.size() &&
             std::string_view("+-.eE0123456789").find(text_[at_]) != std::string_view::npos)
        ++at_;
      check(at_ > start, "an unknown word");
      made.text_ = text_.substr(start, at_ - start);
    }
    return made;
  }

  void object(Json& made, int depth) {
    ++at_;
    if (take('}')) return;
    do {
      check(peek() == '"', "a key is expected");
      const std::string key = text();
      check(take(':'), "':' is expected");
      check(made.items_.emplace(key, value(made.where_ + ": " + key, depth + 1)).second, "a key comes twice");
    } while (take(','));
    check(take('}'), "'}' is expected");
  }

  void list(Json& made, int depth) {
    ++at_;
    if (take(']')) return;
    do made.list_.push_back(value(made.where_, depth + 1));
    while (take(','));
    check(take(']'), "']' is expected");
  }

  uint32_t code() {
    uint32_t found = 0;
    const std::string_view digits = text_.substr(at_, 4);
    const auto [end, fault] = std::from_chars(digits.data(), digits.data() + digits.size(), found, 16);
    check(fault == std::errc() && digits.size() == 4 && end == digits.data() + 4, "four digits are expected");
    at_ += 4;
    return found;
  }

  void escaped(std::string& to) {
    check(at_ < text_.size(), "it ends too early");
    static constexpr std::string_view kFrom = "\"\\/bfnrt", kTo = "\"\\/\b\f\n\r\t";
    const char which = text_[at_++];
    if (const size_t found = kFrom.find(which); found != std::string_view::npos) {
      to += kTo[found];
      return;
    }
    check(which == 'u', "an unknown escape");
    uint32_t found = code();
    if (found >= 0xD800 && found < 0xDC00 && take("\\u")) {
      const uint32_t second = code();
      check(second >= 0xDC00 && second < 0xE000, "half of a character");
      found = 0x10000 + ((found - 0xD800) << 10) + (second - 0xDC00);
    }
    append_utf8(to, found);
  }

  std::string text() {
    std::string found;
    for (++at_;; ++at_) {
      check(at_ < text_.size(), "it ends too early");
      const char next = text_[at_];
      if (next == '"') break;
      if (next != '\\') {
        found += next;
        continue;
      }
      ++at_;
      escaped(found);
      --at_;
    }
    ++at_;
    return found;
  }

  std::string_view text_;
  const std::string& file_;
  size_t at_ = 0;
};

Json Json::parse(std::string_view text, const std::string& file) { return JsonReader(text, file).whole(); }

void Json::refuse(const char* wanted) const {
  throw Fault(LITEBOOST_BAD_FOLDER, where_ + " must be " + wanted + kAgain);
}

bool Json::has(const std::string& key) const { return items().count(key) != 0; }

const Json& Json::operator[](const std::string& key) const {
  const auto found = items().find(key);
  require(found != items().end(), LITEBOOST_BAD_FOLDER, where_, " says nothing of '", key, "'", kAgain);
  return found->second;
}

const std::map<std::string, Json>& Json::items() const {
  if (kind_ != Kind::object) refuse("an object");
  return items_;
}

const std::vector<Json>& Json::list() const {
  if (kind_ != Kind::list) refuse("a list");
  return list_;
}

const std::string& Json::text() const {
  if (kind_ != Kind::text) refuse("a text");
  return text_;
}

bool Json::boolean() const {
  if (kind_ != Kind::boolean) refuse("true or false");
  return boolean_;
}

double Json::number() const {
  if (kind_ != Kind::number) refuse("a number");
  char* end = nullptr;
  const double found = std::strtod(text_.c_str(), &end);
  if (end != text_.c_str() + text_.size() || !std::isfinite(found)) refuse("a number");
  return found;
}

int64_t Json::integer(int64_t least, int64_t most) const {
  int64_t found = 0;
  const char* last = text_.data() + text_.size();
  const auto [end, fault] = std::from_chars(text_.data(), last, found);
  if (kind_ != Kind::number || fault != std::errc() || end != last) refuse("a whole number");
  require(found >= least && found <= most, LITEBOOST_BAD_FOLDER, where_, " must be from ", least, " to ",
          most, ", found ", found, kAgain);
  return found;
}

std::vector<int64_t> Json::integers(int64_t least, int64_t most) const {
  std::vector<int64_t> found;
  for (const Json& each : list()) found.push_back(each.integer(least, most));
  return found;
}

std::vector<std::string> Json::texts() const {
  std::vector<std::string> found;
  for (const Json& each : list()) found.push_back(each.text());
  return found;
}

}  // namespace liteboost::runner
