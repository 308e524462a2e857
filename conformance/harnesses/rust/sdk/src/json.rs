//! A minimal JSON implementation for the protocol: a value, a reader and a writer. Integers keep 64 bits; a larger integer becomes the
//! nearest of 64 bits.

use std::fmt;

#[derive(Clone, Debug, PartialEq)]
pub enum Json {
    Null,
    Bool(bool),
    Integer(i64),
    Number(f64),
    String(String),
    List(Vec<Json>),
    Object(Vec<(String, Json)>),
}

impl Json {
    /// A field of an object, `Null` if it is missing.
    pub fn get(&self, name: &str) -> &Json {
        match self {
            Json::Object(fields) => fields.iter().find(|(field, _)| field == name).map_or(&Json::Null, |(_, value)| value),
            _ => &Json::Null,
        }
    }

    pub fn list(&self) -> &[Json] {
        if let Json::List(values) = self {
            values
        } else {
            &[]
        }
    }

    pub fn text(&self) -> &str {
        if let Json::String(text) = self {
            text
        } else {
            ""
        }
    }

    /// The value as an integer; none for 1.5, "1" and true.
    pub fn integer(&self) -> Option<i64> {
        if let Json::Integer(number) = self {
            Some(*number)
        } else {
            None
        }
    }

    /// The value as a number, also `{"number": "nan"}`, which JSON cannot represent otherwise.
    pub fn number(&self) -> Option<f64> {
        match self {
            Json::Integer(number) => Some(*number as f64),
            Json::Number(number) => Some(*number),
            _ => ["nan", "inf", "-inf"].contains(&self.get("number").text()).then(|| self.get("number").text().parse().unwrap()),
        }
    }

    /// Parses a line. An error contains the byte position at which it is not valid JSON.
    pub fn parse(line: &str) -> Result<Json, String> {
        let mut reader = Reader { text: line.as_bytes(), at: 0 };
        let value = reader.value()?;
        reader.space();
        if reader.at < reader.text.len() {
            reader.wrong("the end of the line")
        } else {
            Ok(value)
        }
    }
}

struct Reader<'a> {
    text: &'a [u8],
    at: usize,
}

impl Reader<'_> {
    fn wrong<T>(&self, expected: &str) -> Result<T, String> {
        Err(format!("expected {expected} at byte {}", self.at))
    }

    fn space(&mut self) {
        while self.text.get(self.at).is_some_and(u8::is_ascii_whitespace) {
            self.at += 1;
        }
    }

    /// Reads the next byte if it is this one, and returns whether it was.
    fn next_is(&mut self, byte: u8) -> bool {
        self.space();
        let found = self.text.get(self.at) == Some(&byte);
        self.at += usize::from(found);
        found
    }

    fn value(&mut self) -> Result<Json, String> {
        self.space();
        match self.text.get(self.at) {
            Some(b'{') => self.object(),
            Some(b'[') => self.array(),
            Some(b'"') => Ok(Json::String(self.string()?)),
            Some(b'-' | b'0'..=b'9') => self.number(),
            _ => self.word(),
        }
    }

    fn word(&mut self) -> Result<Json, String> {
        for (word, value) in [("null", Json::Null), ("true", Json::Bool(true)), ("false", Json::Bool(false))] {
            if self.text[self.at..].starts_with(word.as_bytes()) {
                self.at += word.len();
                return Ok(value);
            }
        }
        self.wrong("a value")
    }

    fn number(&mut self) -> Result<Json, String> {
        let start = self.at;
        while self.text.get(self.at).is_some_and(|byte| matches!(byte, b'+' | b'-' | b'.' | b'e' | b'E' | b'0'..=b'9')) {
            self.at += 1;
        }
        let digits = String::from_utf8_lossy(&self.text[start..self.at]);
        if !digits.contains(['.', 'e', 'E']) {
            let nearest = digits.parse::<i128>().map(|number| number.clamp(i64::MIN.into(), i64::MAX.into()) as i64);
            return nearest.map(Json::Integer).or_else(|_| self.wrong("an integer"));
        }
        digits.parse().map(Json::Number).or_else(|_| self.wrong("a number"))
    }

    fn string(&mut self) -> Result<String, String> {
        let mut bytes = Vec::new();
        self.at += 1;
        loop {
            match self.text.get(self.at) {
                None => return self.wrong("the end of a string"),
                Some(b'"') => break,
                Some(b'\\') => {
                    let mut letter = [0; 4];
                    bytes.extend(self.escaped()?.encode_utf8(&mut letter).bytes());
                }
                Some(byte) => {
                    bytes.push(*byte);
                    self.at += 1;
                }
            }
        }
        self.at += 1;
        String::from_utf8(bytes).or_else(|_| self.wrong("UTF-8"))
    }

    fn escaped(&mut self) -> Result<char, String> {
        let letter = self.text.get(self.at + 1).copied();
        self.at += 2;
        Ok(match letter {
            Some(b'n') => '\n',
            Some(b't') => '\t',
            Some(b'r') => '\r',
            Some(b'b') => '\u{8}',
            Some(b'f') => '\u{c}',
            Some(b'u') => {
                let high = self.hex()?;
                if !(0xD800..0xDC00).contains(&high) {
                    return char::from_u32(high).map_or_else(|| self.wrong("a character"), Ok);
                }
                self.at += 2; // the \u of the second surrogate
                let low = self.hex()?.wrapping_sub(0xDC00);
                return char::from_u32(0x10000 + ((high - 0xD800) << 10) + low).map_or_else(|| self.wrong("a character"), Ok);
            }
            Some(byte @ (b'"' | b'\\' | b'/')) => byte as char,
            _ => return self.wrong("an escaped character"),
        })
    }

    fn hex(&mut self) -> Result<u32, String> {
        let digits = self.text.get(self.at..self.at + 4).map(String::from_utf8_lossy).unwrap_or_default();
        self.at += 4;
        u32::from_str_radix(&digits, 16).or_else(|_| self.wrong("four hexadecimal digits"))
    }

    fn array(&mut self) -> Result<Json, String> {
        let mut values = Vec::new();
        self.at += 1;
        if self.next_is(b']') {
            return Ok(Json::List(values));
        }
        loop {
            values.push(self.value()?);
            if self.next_is(b']') {
                return Ok(Json::List(values));
            }
            if !self.next_is(b',') {
                return self.wrong("a comma");
            }
        }
    }

    fn object(&mut self) -> Result<Json, String> {
        let mut fields = Vec::new();
        self.at += 1;
        if self.next_is(b'}') {
            return Ok(Json::Object(fields));
        }
        loop {
            self.space();
            if self.text.get(self.at) != Some(&b'"') {
                return self.wrong("a name");
            }
            let name = self.string()?;
            if !self.next_is(b':') {
                return self.wrong("a colon");
            }
            fields.push((name, self.value()?));
            if self.next_is(b'}') {
                return Ok(Json::Object(fields));
            }
            if !self.next_is(b',') {
                return self.wrong("a comma");
            }
        }
    }
}

impl fmt::Display for Json {
    fn fmt(&self, out: &mut fmt::Formatter) -> fmt::Result {
        fn joined<T>(out: &mut fmt::Formatter, items: &[T], one: impl Fn(&mut fmt::Formatter, &T) -> fmt::Result) -> fmt::Result {
            for (i, item) in items.iter().enumerate() {
                out.write_str(if i > 0 { ", " } else { "" })?;
                one(out, item)?;
            }
            Ok(())
        }
        match self {
            Json::Null => out.write_str("null"),
            Json::Bool(value) => write!(out, "{value}"),
            Json::Integer(number) => write!(out, "{number}"),
            Json::Number(number) if number.is_finite() => write!(out, "{number:?}"),
            Json::Number(number) => write!(out, "{{\"number\": \"{}\"}}", number.to_string().to_lowercase()),
            Json::String(text) => {
                out.write_str("\"")?;
                for letter in text.chars() {
                    match letter {
                        '"' | '\\' => write!(out, "\\{letter}")?,
                        control if control < ' ' => write!(out, "\\u{:04x}", control as u32)?,
                        other => write!(out, "{other}")?,
                    }
                }
                out.write_str("\"")
            }
            Json::List(values) => {
                out.write_str("[")?;
                joined(out, values, |out, value| write!(out, "{value}"))?;
                out.write_str("]")
            }
            Json::Object(fields) => {
                out.write_str("{")?;
                joined(out, fields, |out, (name, value)| write!(out, "{}: {value}", Json::String(name.clone())))?;
                out.write_str("}")
            }
        }
    }
}

/// An object from its fields.
pub fn object<const N: usize>(fields: [(&str, Json); N]) -> Json {
    Json::Object(fields.into_iter().map(|(name, value)| (name.to_string(), value)).collect())
}

impl From<i64> for Json {
    fn from(number: i64) -> Json {
        Json::Integer(number)
    }
}

impl From<&str> for Json {
    fn from(text: &str) -> Json {
        Json::String(text.to_string())
    }
}
