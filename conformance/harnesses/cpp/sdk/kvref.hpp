// The SDK of kvref for caches in C++17: one header without dependencies. It reads requests from standard input, converts them to calls
// of your class, and writes the replies (kvref/spec/protocol.md). Little-endian machines only.
//
//     kvref::Harness harness("mycache", "0.1", {"float32"});
//     harness.family<MyPool>("blocks", {"num_blocks >= 0"}, [](const kvref::Sizes& sizes) { return std::make_shared<MyPool>(sizes); })
//         .operation("num_free", {}, &MyPool::num_free)
//         .operation("free", {"block"}, &MyPool::free);
//     return harness.serve();
//
// The types of the method decide how arguments are read and results are written:
//
//     std::int64_t, double, bool, std::string      a number, a boolean, a text
//     std::vector<std::int64_t or double>          a list; a result is sent as an array
//     std::vector<std::vector<std::int64_t>>       a result only: an array of two axes; all rows have one length
//     kvref::Array                                 float32 numbers with a shape; float16 and bfloat16 arguments are widened
//     kvref::Raw                                   an array of any dtype, as bytes
//     std::optional<T>                             an optional argument, or a result that can be null
//     std::pair, std::tuple                        a result that is a list
//     kvref::Json                                  anything else, such as statistics
//     std::shared_ptr<T>                           a result that is an object of another class (`handed_out`)
//
// A parameter "keys [n, num_kv_heads, head_dim]" also checks the shape: an axis with the name of a size of the object has this length,
// and another name has one length in the whole call. An axis "..." stands for any further axes.
#pragma once

#if defined(_MSVC_LANG) ? _MSVC_LANG < 201703L : __cplusplus < 201703L
#error "kvref.hpp needs C++17: compile with -std=c++17 or a newer standard"
#endif

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iostream>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <typeindex>
#include <utility>
#include <vector>

namespace kvref {

// The exception that a cache throws: `kind` is one of the specification's error names. An operation that throws must change nothing.
struct Error : std::runtime_error {
    Error(std::string kind, const std::string& message) : std::runtime_error(message), kind(std::move(kind)) {}
    std::string kind;
};

// Declines an operation. It counts as neither passed nor failed.
[[noreturn]] inline void not_offered(const std::string& why) { throw Error("NotOffered", why); }

// Throws an error of this kind unless 0 <= value < stop.
inline void in_range(std::int64_t value, std::int64_t stop, const char* kind, const std::string& what) {
    if (value < 0 || value >= stop) {
        throw Error(kind, what + ": expected an integer in [0, " + std::to_string(stop) + "), got " + std::to_string(value));
    }
}

using Integers = std::vector<std::int64_t>;
using Shape = std::vector<std::int64_t>;

inline std::string shown(const Shape& shape) {
    std::string text;
    for (std::int64_t axis : shape) text += (text.empty() ? "" : ", ") + std::to_string(axis);
    return "[" + text + "]";
}

// A JSON value. Integers keep 64 bits; a larger integer becomes the nearest of 64 bits.
struct Json {
    enum class Kind { null, boolean, integer, number, text, list, object };
    using Fields = std::vector<std::pair<std::string, Json>>;

    Kind kind = Kind::null;
    std::int64_t whole = 0;  // of a boolean or an integer
    double real = 0.0;
    std::string text;
    std::vector<Json> items;
    Fields fields;

    Json() = default;
    Json(std::nullptr_t) {}
    Json(bool value) : kind(Kind::boolean), whole(value) {}
    Json(int value) : kind(Kind::integer), whole(value) {}
    Json(std::int64_t value) : kind(Kind::integer), whole(value) {}
    Json(double value) : kind(Kind::number), real(value) {}
    Json(std::string value) : kind(Kind::text), text(std::move(value)) {}
    Json(const char* value) : Json(std::string(value)) {}

    static Json list(std::vector<Json> items) {
        Json made;
        made.kind = Kind::list;
        made.items = std::move(items);
        return made;
    }

    static Json object(Fields fields) {
        Json made;
        made.kind = Kind::object;
        made.fields = std::move(fields);
        return made;
    }

    bool is_null() const { return kind == Kind::null; }

    // A field of an object, or null if it is missing.
    const Json& get(const std::string& name) const {
        static const Json missing;
        for (const auto& [field, value] : fields) {
            if (field == name) return value;
        }
        return missing;
    }

    // A number, also {"number": "nan"}, which JSON cannot represent otherwise.
    std::optional<double> as_number() const {
        if (kind == Kind::integer) return static_cast<double>(whole);
        if (kind == Kind::number) return real;
        const std::string& name = get("number").text;
        const double infinity = std::numeric_limits<double>::infinity();
        if (name == "inf") return infinity;
        if (name == "-inf") return -infinity;
        if (name == "nan") return std::numeric_limits<double>::quiet_NaN();
        return std::nullopt;
    }

    std::string dump() const {
        std::string out;
        write(out);
        return out;
    }

    static Json parse(const std::string& line);

private:
    static void quote(const std::string& text, std::string& out) {
        static const char hex[] = "0123456789abcdef";
        out += '"';
        for (const char letter : text) {
            const auto byte = static_cast<unsigned char>(letter);
            if (letter == '"' || letter == '\\') out += '\\', out += letter;
            else if (byte < 32) out += "\\u00", out += hex[byte >> 4], out += hex[byte & 15];
            else out += letter;
        }
        out += '"';
    }

    void write(std::string& out) const {
        const char* separator = "";
        switch (kind) {
            case Kind::null: out += "null"; break;
            case Kind::boolean: out += whole ? "true" : "false"; break;
            case Kind::integer: out += std::to_string(whole); break;
            case Kind::text: quote(text, out); break;
            case Kind::number: {
                char digits[32];
                std::snprintf(digits, sizeof digits, "%.17g", real);
                if (std::isfinite(real)) out += digits;
                else out += std::isnan(real) ? R"({"number": "nan"})" : real > 0 ? R"({"number": "inf"})" : R"({"number": "-inf"})";
                break;
            }
            case Kind::list:
                out += '[';
                for (const Json& item : items) out += std::exchange(separator, ", "), item.write(out);
                out += ']';
                break;
            case Kind::object:
                out += '{';
                for (const auto& [name, value] : fields) {
                    out += std::exchange(separator, ", ");
                    quote(name, out);
                    out += ": ";
                    value.write(out);
                }
                out += '}';
                break;
        }
    }
};

namespace detail {

class Reader {
public:
    explicit Reader(const std::string& text) : at_(text.data()), start_(text.data()), end_(text.data() + text.size()) {}

    Json document() {
        Json value = this->value(0);
        if (peek()) wrong("the end of the line");
        return value;
    }

private:
    static constexpr int MAX_DEPTH = 100;

    [[noreturn]] void wrong(const char* expected) const {
        throw std::runtime_error("JSON: expected " + std::string(expected) + " at byte " + std::to_string(at_ - start_));
    }

    // The next byte that is not a space, or 0 at the end.
    char peek() {
        while (at_ < end_ && (*at_ == ' ' || *at_ == '\t' || *at_ == '\r' || *at_ == '\n')) ++at_;
        return at_ < end_ ? *at_ : '\0';
    }

    bool next_is(char byte) {
        const bool found = peek() == byte;
        at_ += found;
        return found;
    }

    Json value(int depth) {
        if (depth > MAX_DEPTH) wrong("fewer nested values");
        const char first = peek();
        if (first == '"') return string();
        if (first == '-' || (first >= '0' && first <= '9')) return number();
        if (first == '[') {
            std::vector<Json> items;
            for (++at_; !next_is(']');) {
                if (!items.empty() && !next_is(',')) wrong("a comma");
                items.push_back(value(depth + 1));
            }
            return Json::list(std::move(items));
        }
        if (first == '{') {
            Json::Fields fields;
            for (++at_; !next_is('}');) {
                if (!fields.empty() && !next_is(',')) wrong("a comma");
                if (peek() != '"') wrong("a name");
                std::string name = string();
                if (!next_is(':')) wrong("a colon");
                fields.emplace_back(std::move(name), value(depth + 1));
            }
            return Json::object(std::move(fields));
        }
        if (word("null")) return nullptr;
        if (word("true")) return true;
        if (word("false")) return false;
        wrong("a value");
    }

    bool word(const char* name) {
        const std::size_t size = std::strlen(name);
        const bool found = static_cast<std::size_t>(end_ - at_) >= size && std::memcmp(at_, name, size) == 0;
        at_ += found ? size : 0;
        return found;
    }

    Json number() {
        const char* first = at_;
        while (at_ < end_ && std::strchr("+-.eE0123456789", *at_)) ++at_;
        const std::string digits(first, at_);
        if (digits.find_first_of(".eE") == std::string::npos) {
            return static_cast<std::int64_t>(std::strtoll(digits.c_str(), nullptr, 10));  // the nearest of 64 bits
        }
        return std::strtod(digits.c_str(), nullptr);
    }

    std::string string() {
        std::string text;
        for (++at_;;) {
            const char* run = at_;
            while (at_ < end_ && *at_ != '"' && *at_ != '\\') ++at_;
            text.append(run, at_);
            if (at_ >= end_) wrong("the end of a string");
            if (*at_++ == '"') return text;
            escaped(text);
        }
    }

    void escaped(std::string& text) {
        static const std::string letters = "\"\\/bfnrt", meanings = "\"\\/\b\f\n\r\t";
        const char letter = at_ < end_ ? *at_++ : '\0';
        if (letter != 'u') {
            const std::size_t found = letters.find(letter);
            if (letter == '\0' || found == std::string::npos) wrong("an escaped character");
            text += meanings[found];
            return;
        }
        std::uint32_t code = hex();
        if (code >= 0xD800 && code < 0xDC00 && end_ - at_ >= 6 && at_[0] == '\\' && at_[1] == 'u') {
            at_ += 2;
            code = 0x10000 + ((code - 0xD800) << 10) + (hex() - 0xDC00);
        }
        const auto add = [&text](std::uint32_t byte) { text += static_cast<char>(byte); };
        if (code < 0x80) add(code);
        else if (code < 0x800) add(0xC0 | code >> 6), add(0x80 | (code & 63));
        else if (code < 0x10000) add(0xE0 | code >> 12), add(0x80 | (code >> 6 & 63)), add(0x80 | (code & 63));
        else add(0xF0 | code >> 18), add(0x80 | (code >> 12 & 63)), add(0x80 | (code >> 6 & 63)), add(0x80 | (code & 63));
    }

    std::uint32_t hex() {
        if (end_ - at_ < 4) wrong("four hexadecimal digits");
        const std::string digits(at_, at_ + 4);
        at_ += 4;
        return static_cast<std::uint32_t>(std::strtoul(digits.c_str(), nullptr, 16));
    }

    const char *at_, *start_, *end_;
};

constexpr char DIGITS[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

inline std::string decoded_base64(const std::string& text) {
    static const auto values = [] {
        std::array<int, 256> values{};
        values.fill(-1);
        for (int i = 0; i < 64; ++i) values[static_cast<unsigned char>(DIGITS[i])] = i;
        return values;
    }();
    std::string bytes;
    bytes.reserve(text.size() / 4 * 3);
    unsigned buffer = 0;
    int bits = 0;
    for (unsigned char letter : text) {
        if (values[letter] < 0) break;  // the padding
        buffer = buffer << 6 | static_cast<unsigned>(values[letter]);
        bits += 6;
        if (bits >= 8) bytes.push_back(static_cast<char>(buffer >> (bits -= 8) & 255));
    }
    return bytes;
}

inline std::string encoded_base64(const void* data, std::size_t size) {
    const auto* bytes = static_cast<const unsigned char*>(data);
    std::string text;
    text.reserve((size + 2) / 3 * 4);
    for (std::size_t i = 0; i < size; i += 3) {
        const std::size_t left = std::min<std::size_t>(3, size - i);
        const unsigned three = bytes[i] << 16 | (left > 1 ? bytes[i + 1] << 8 : 0) | (left > 2 ? bytes[i + 2] : 0);
        for (std::size_t digit = 0; digit < 4; ++digit) text.push_back(digit <= left ? DIGITS[three >> (18 - 6 * digit) & 63] : '=');
    }
    return text;
}

inline Json array_json(const char* dtype, const Shape& shape, const void* data, std::size_t size) {
    std::vector<Json> axes(shape.begin(), shape.end());
    return Json::object({{"dtype", dtype}, {"shape", Json::list(std::move(axes))}, {"base64", encoded_base64(data, size)}});
}

// Converts a float16 or bfloat16 code to float, exactly.
inline float widened(std::uint16_t code, bool is_bfloat16) {
    std::uint32_t bits = static_cast<std::uint32_t>(code) << 16;
    if (!is_bfloat16) {
        const std::uint32_t sign = (code & 0x8000u) << 16, exponent = code >> 10 & 31, mantissa = code & 1023;
        if (exponent == 0) {
            const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
            return sign ? -magnitude : magnitude;
        }
        bits = sign | (exponent == 31 ? 255u : exponent + 112) << 23 | mantissa << 13;
    }
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

template <typename Number>
std::vector<Number> numbers_of(const std::string& bytes) {
    std::vector<Number> numbers(bytes.size() / sizeof(Number));
    std::memcpy(numbers.data(), bytes.data(), numbers.size() * sizeof(Number));
    return numbers;
}

inline std::string trimmed(const std::string& text) {
    const std::size_t first = text.find_first_not_of(' ');
    return first == std::string::npos ? "" : text.substr(first, text.find_last_not_of(' ') - first + 1);
}

}  // namespace detail

inline Json Json::parse(const std::string& line) { return detail::Reader(line).document(); }

// Float32 numbers in C order.
struct Array {
    Shape shape;
    std::vector<float> numbers;
};

// An array of any dtype: little-endian bytes in C order.
struct Raw {
    std::string dtype;
    Shape shape;
    std::string bytes;
};

// The sizes, formats and options that an object is created with, by name. Sizes and formats have been checked.
class Sizes {
public:
    explicit Sizes(Json args) : args_(std::move(args)) {}

    std::int64_t integer(const std::string& name) const { return args_.get(name).whole; }
    const std::string& text(const std::string& name) const { return args_.get(name).text; }
    std::optional<double> number(const std::string& name) const { return args_.get(name).as_number(); }
    bool has(const std::string& name) const { return args_.get(name).kind == Json::Kind::integer; }
    const Json& get(const std::string& name) const { return args_.get(name); }

private:
    Json args_;
};

// The order of the axes of tokens and heads in your cache. The judge uses NHD, [tokens, heads, head_dim].
enum class Layout { NHD, HND };

namespace detail {

// A parameter as it is declared: "layer", or "keys [n, num_kv_heads, head_dim]".
struct Parameter {
    std::string name;
    std::vector<std::string> axes;
    bool has_shape;

    explicit Parameter(const std::string& text) : name(trimmed(text.substr(0, text.find('[')))), has_shape(text.find('[') != text.npos) {
        if (!has_shape) return;
        const std::size_t first = text.find('[') + 1, last = text.rfind(']');
        for (std::size_t at = first; at < last;) {
            const std::size_t comma = std::min(text.find(',', at), last);
            axes.push_back(trimmed(text.substr(at, comma - at)));
            at = comma + 1;
        }
    }

    std::string shape() const {
        std::string all;
        for (const std::string& axis : axes) all += (all.empty() ? "" : ", ") + axis;
        return "[" + all + "]";
    }
};

inline Array swapped_axes(const Array& array) {
    const std::size_t axes = array.shape.size();
    Array swapped{array.shape, std::vector<float>(array.numbers.size())};
    std::swap(swapped.shape[axes - 3], swapped.shape[axes - 2]);
    const std::size_t outer = static_cast<std::size_t>(array.shape[axes - 3]), inner = static_cast<std::size_t>(array.shape[axes - 2]);
    const std::size_t row = static_cast<std::size_t>(array.shape[axes - 1]), plane = outer * inner * row;
    for (std::size_t base = 0; plane > 0 && base < array.numbers.size(); base += plane) {
        for (std::size_t i = 0; i < outer; ++i) {
            for (std::size_t j = 0; j < inner; ++j) {
                std::copy_n(&array.numbers[base + (i * inner + j) * row], row, &swapped.numbers[base + (j * outer + i) * row]);
            }
        }
    }
    return swapped;
}

// One request: its arguments, and the lengths of the axes that earlier arguments have.
struct Call {
    const Json& args;
    const Sizes& sizes;
    Layout layout;
    std::map<std::string, std::int64_t> lengths;
    std::function<Json(std::type_index, std::shared_ptr<void>)> hand_out;

    [[noreturn]] static void expected(const std::string& name, const std::string& what, const Json& got) {
        throw Error("ConfigError", name + ": expected " + what + ", got " + got.dump());
    }

    void check_shape(const Parameter& parameter, const Shape& shape) {
        const bool open = !parameter.axes.empty() && parameter.axes.back() == "...";
        const std::size_t count = parameter.axes.size() - open;
        bool fits = open ? shape.size() >= count : shape.size() == count;
        for (std::size_t i = 0; fits && i < count; ++i) {
            const std::string& axis = parameter.axes[i];
            if (axis.find(' ') != std::string::npos) continue;  // "nope_dim + rope_dim"
            if (axis.find_first_not_of("0123456789") == std::string::npos) fits = std::to_string(shape[i]) == axis;
            else if (sizes.has(axis)) fits = shape[i] == sizes.integer(axis);
            else fits = lengths.emplace(axis, shape[i]).first->second == shape[i];
        }
        if (!fits) throw Error("ShapeMismatch", parameter.name + ": expected shape " + parameter.shape() + ", got " + shown(shape));
    }

    Raw raw(const Parameter& parameter) {
        const Json& given = args.get(parameter.name);
        if (given.get("base64").kind != Json::Kind::text) expected(parameter.name, "an array", given);
        Raw array{given.get("dtype").text, {}, decoded_base64(given.get("base64").text)};
        for (const Json& axis : given.get("shape").items) array.shape.push_back(axis.whole);
        if (parameter.has_shape) check_shape(parameter, array.shape);
        return array;
    }

    void read(const Parameter& parameter, std::int64_t& value) {
        const Json& given = args.get(parameter.name);
        if (given.kind != Json::Kind::integer) expected(parameter.name, "an integer", given);
        value = given.whole;
    }

    void read(const Parameter& parameter, double& value) {
        const std::optional<double> number = args.get(parameter.name).as_number();
        if (!number) expected(parameter.name, "a number", args.get(parameter.name));
        value = *number;
    }

    void read(const Parameter& parameter, bool& value) { value = args.get(parameter.name).whole != 0; }
    void read(const Parameter& parameter, std::string& value) { value = args.get(parameter.name).text; }
    void read(const Parameter& parameter, Raw& value) { value = raw(parameter); }

    // All arguments, if the parameter is "...".
    void read(const Parameter& parameter, Json& value) { value = parameter.name == "..." ? args : args.get(parameter.name); }

    void read(const Parameter& parameter, Integers& values) {
        const Json& given = args.get(parameter.name);
        if (!given.get("base64").is_null()) {
            const Raw array = raw(parameter);
            if (array.dtype != "int64") {
                throw Error("DtypeMismatch", parameter.name + ": expected int64, got " + array.dtype);
            }
            values = numbers_of<std::int64_t>(array.bytes);
            return;
        }
        if (given.kind != Json::Kind::list) expected(parameter.name, "a list of integers", given);
        for (const Json& item : given.items) {
            if (item.kind != Json::Kind::integer) expected(parameter.name, "a list of integers", given);
            values.push_back(item.whole);
        }
        lengths.emplace(parameter.name, static_cast<std::int64_t>(values.size()));
    }

    void read(const Parameter& parameter, std::vector<double>& values) {
        const Json& given = args.get(parameter.name);
        if (given.kind != Json::Kind::list) expected(parameter.name, "a list of numbers", given);
        for (const Json& item : given.items) {
            const std::optional<double> number = item.as_number();
            if (!number) expected(parameter.name, "a list of numbers", given);
            values.push_back(*number);
        }
    }

    void read(const Parameter& parameter, Array& value) {
        Raw array = raw(parameter);
        value.shape = array.shape;
        if (array.dtype == "float32") {
            value.numbers = numbers_of<float>(array.bytes);
        } else if (array.dtype == "float16" || array.dtype == "bfloat16") {
            for (std::uint16_t code : numbers_of<std::uint16_t>(array.bytes)) value.numbers.push_back(widened(code, array.dtype == "bfloat16"));
        } else {
            throw Error("DtypeMismatch", parameter.name + ": expected float32, float16 or bfloat16, got " + array.dtype);
        }
        const std::size_t axes = parameter.axes.size();
        if (layout == Layout::HND && axes >= 3 && parameter.axes[axes - 3] != "num_layers") value = swapped_axes(value);
    }

    template <typename T>
    void read(const Parameter& parameter, std::optional<T>& value) {
        if (args.get(parameter.name).is_null()) return;
        T found{};
        read(parameter, found);
        value = std::move(found);
    }

    Json written(bool value) const { return value; }
    Json written(std::int64_t value) const { return value; }
    Json written(double value) const { return value; }
    Json written(const std::string& value) const { return value; }
    Json written(const Json& value) const { return value; }
    Json written(const Raw& value) const { return array_json(value.dtype.c_str(), value.shape, value.bytes.data(), value.bytes.size()); }

    Json written(const Array& value) const {
        const bool swaps = layout == Layout::HND && value.shape.size() >= 3;
        const Array& sent = swaps ? swapped_axes(value) : value;
        return array_json("float32", sent.shape, sent.numbers.data(), sent.numbers.size() * sizeof(float));
    }

    Json written(const Integers& values) const {
        return array_json("int64", {static_cast<std::int64_t>(values.size())}, values.data(), values.size() * sizeof(std::int64_t));
    }

    Json written(const std::vector<Integers>& rows) const {
        Integers all;
        for (const Integers& row : rows) all.insert(all.end(), row.begin(), row.end());
        const std::int64_t count = static_cast<std::int64_t>(rows.size());
        const std::int64_t width = rows.empty() ? 0 : static_cast<std::int64_t>(rows[0].size());
        return array_json("int64", {count, width}, all.data(), all.size() * sizeof(std::int64_t));
    }

    template <typename T>
    Json written(const std::optional<T>& value) const {
        return value ? written(*value) : Json();
    }

    template <typename A, typename B>
    Json written(const std::pair<A, B>& both) const {
        return Json::list({written(both.first), written(both.second)});
    }

    template <typename... Parts>
    Json written(const std::tuple<Parts...>& all) const {
        return std::apply([this](const Parts&... parts) { return Json::list({written(parts)...}); }, all);
    }

    template <typename T>
    Json written(const std::shared_ptr<T>& object) const {
        return hand_out(typeid(T), object);
    }
};

using Operations = std::map<std::string, std::function<Json(void*, Call&)>>;

}  // namespace detail

// The operations of one family, as methods of a class T.
template <typename T>
class Family {
public:
    explicit Family(detail::Operations& operations) : operations_(operations) {}

    // parameters: the names of the arguments in the order of the method's parameters, with the axes of arrays.
    template <typename Owner, typename Result, typename... Arguments>
    Family& operation(const std::string& name, const std::vector<std::string>& parameters, Result (Owner::*method)(Arguments...)) {
        return add<std::decay_t<Arguments>...>(name, parameters, [method](T& object, auto&... arguments) {
            return (object.*method)(arguments...);
        });
    }

    template <typename Owner, typename Result, typename... Arguments>
    Family& operation(const std::string& name, const std::vector<std::string>& parameters, Result (Owner::*method)(Arguments...) const) {
        return add<std::decay_t<Arguments>...>(name, parameters, [method](T& object, auto&... arguments) {
            return (object.*method)(arguments...);
        });
    }

private:
    template <typename... Values, typename Function>
    Family& add(const std::string& name, const std::vector<std::string>& texts, Function function) {
        if (texts.size() != sizeof...(Values)) {
            throw std::logic_error(name + ": " + std::to_string(texts.size()) + " names for " + std::to_string(sizeof...(Values)) + " parameters");
        }
        const std::vector<detail::Parameter> parameters(texts.begin(), texts.end());
        operations_[name] = [parameters, function](void* object, detail::Call& call) -> Json {
            std::tuple<Values...> values;
            std::size_t next = 0;
            std::apply([&](auto&... each) { (call.read(parameters[next++], each), ...); }, values);
            return std::apply(
                [&](auto&... each) -> Json {
                    if constexpr (std::is_void_v<decltype(function(*static_cast<T*>(object), each...))>) {
                        function(*static_cast<T*>(object), each...);
                        return nullptr;
                    } else {
                        return call.written(function(*static_cast<T*>(object), each...));
                    }
                },
                values);
        };
        return *this;
    }

    detail::Operations& operations_;
};

class Harness {
public:
    // level: "exact" if codes and scales have the bits that the specification defines, "tolerant" if they are within its bounds.
    Harness(std::string name, std::string version, std::vector<std::string> formats, std::string level = "exact")
        : name_(std::move(name)), version_(std::move(version)), level_(std::move(level)), formats_(std::move(formats)) {}

    // Declares limits as JSON: R"({"head_dim": [64, 128], "num_layers": {"most": 1}})".
    void limits(const std::string& json) { limits_ = Json::parse(json); }

    // Declares a family. sizes: the arguments that it is created with, "num_blocks >= 0", "block_size" (at least 1) or "dtype: format" (one
    // of the formats). make: returns a std::shared_ptr<T>. Other values raise ConfigError before `make` is called.
    template <typename T, typename Make>
    Family<T> family(const std::string& name, std::vector<std::string> sizes, Make make, Layout layout = Layout::NHD) {
        families_.push_back(name);
        Entry& entry = entries_[name];
        entry.sizes = std::move(sizes);
        entry.layout = layout;
        entry.make = [make](const Sizes& sizes) -> std::shared_ptr<void> { return std::shared_ptr<T>(make(sizes)); };
        return Family<T>(entry.operations);
    }

    // Declares the class of objects that an operation returns, such as the buffers of a pool.
    template <typename T>
    Family<T> handed_out(const std::string& name) {
        handed_out_.insert_or_assign(std::type_index(typeid(T)), name);
        return Family<T>(entries_[name].operations);
    }

    // Replies to every line of standard input until "bye" or the end of the input. Returns the exit status.
    int serve() {
        std::ios::sync_with_stdio(false);
        std::string op;
        for (std::string line; op != "bye" && std::getline(std::cin, line);) {
            Json request, reply;
            try {
                request = Json::parse(line);
                op = request.get("op").text;
                reply = Json::object({{"id", request.get("id")}, {"ok", perform(request)}});
            } catch (const Error& error) {
                reply = failure(request, error.kind, error.what());
            } catch (const std::exception& error) {  // no memory, or a fault in the cache
                reply = failure(request, "InternalError", error.what());
            }
            std::cout << reply.dump() << std::endl;  // endl flushes
        }
        return 0;
    }

private:
    struct Entry {
        std::vector<std::string> sizes;
        Layout layout = Layout::NHD;
        std::function<std::shared_ptr<void>(const Sizes&)> make;
        detail::Operations operations;
    };

    struct Object {
        std::string family;
        std::shared_ptr<void> self;
        Sizes sizes;
    };

    static Json failure(const Json& request, const std::string& kind, const char* message) {
        return Json::object({{"id", request.get("id")}, {"error", Json::object({{"kind", kind}, {"message", message}})}});
    }

    Json about() const {
        const auto texts = [](const std::vector<std::string>& all) { return Json::list(std::vector<Json>(all.begin(), all.end())); };
        Json::Fields fields{{"name", name_}, {"version", version_}, {"language", "c++"}, {"level", level_},
                            {"formats", texts(formats_)}, {"families", texts(families_)}};
        if (!limits_.is_null()) fields.emplace_back("limits", limits_);
        return Json::object(std::move(fields));
    }

    Json perform(const Json& request) {
        const std::string& op = request.get("op").text;
        const std::int64_t id = request.get("id").whole;
        if (op == "hello") {
            objects_.clear();  // a new sequence of calls starts
            return about();
        }
        if (op == "bye") return nullptr;
        const std::string family = op.substr(0, op.find('.')), name = op.substr(std::min(op.size(), op.find('.') + 1));
        const auto entry = entries_.find(family);
        if (entry == entries_.end()) not_offered("family " + family);
        const auto keep = [&](const std::string& of, std::shared_ptr<void> made, const Sizes& sizes) {
            objects_.insert_or_assign(id, Object{of, std::move(made), sizes});
            return Json::object({{"handle", id}});
        };
        if (name == "new" && entry->second.make) {
            const Sizes sizes = checked(entry->second.sizes, request.get("args"));
            return keep(family, entry->second.make(sizes), sizes);
        }
        const auto object = objects_.find(request.get("on").kind == Json::Kind::integer ? request.get("on").whole : -1);
        const auto operation = entry->second.operations.find(name);
        if (object == objects_.end() || object->second.family != family || operation == entry->second.operations.end()) not_offered(op);
        const Object called = object->second;  // a handed-out object can move it
        detail::Call call{request.get("args"), called.sizes, entry->second.layout, {}, [&](std::type_index type, std::shared_ptr<void> made) {
                              return keep(handed_out_.at(type), std::move(made), called.sizes);
                          }};
        return operation->second(called.self.get(), call);
    }

    Sizes checked(const std::vector<std::string>& declared, const Json& args) const {
        for (const std::string& text : declared) {
            const std::string name = text.substr(0, text.find_first_of(" :"));
            const Json& given = args.get(name);
            if (text.find(':') != std::string::npos) {
                if (std::find(formats_.begin(), formats_.end(), given.text) == formats_.end() || given.kind != Json::Kind::text) {
                    detail::Call::expected(name, "a supported format", given);
                }
            } else {
                const std::int64_t least = text.find(">= 0") == std::string::npos ? 1 : 0;
                if (given.kind != Json::Kind::integer || given.whole < least) {
                    detail::Call::expected(name, "an integer of at least " + std::to_string(least), given);
                }
            }
        }
        for (const auto& [name, value] : args.fields) {
            if (!value.get("handle").is_null()) not_offered(name + ": an object as an argument");
        }
        return Sizes(args);
    }

    std::string name_, version_, level_;
    std::vector<std::string> formats_, families_;
    Json limits_;
    std::map<std::string, Entry> entries_;
    std::map<std::type_index, std::string> handed_out_;
    std::map<std::int64_t, Object> objects_;  // by the id of the request that created them
};

}  // namespace kvref
