//! Follows a pickle's steps over plain values.

use engine_core::DType;

type Result<T> = std::result::Result<T, String>;

/// What the pickle says of a tensor; nothing of it is checked against anything.
#[derive(Debug)]
pub(super) struct FoundTensor {
    pub(super) name: String,
    pub(super) storage: Storage,
    /// In elements.
    pub(super) offset: u64,
    /// Outermost first.
    pub(super) sizes: Vec<u64>,
    pub(super) strides: Vec<u64>,
}

/// A row of numbers in a file of its own.
#[derive(Clone, Debug)]
pub(super) struct Storage {
    pub(super) key: String,
    pub(super) dtype: DType,
    pub(super) elements: u64,
}

/// The names that may be named.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Name {
    OrderedDict,
    RebuildTensor,
    RebuildParameter,
    Storage(DType),
}

const NAMES: &[(&str, &str, Name)] = &[
    ("collections", "OrderedDict", Name::OrderedDict),
    ("torch._utils", "_rebuild_tensor_v2", Name::RebuildTensor),
    ("torch._utils", "_rebuild_parameter", Name::RebuildParameter),
    ("torch", "FloatStorage", Name::Storage(DType::F32)),
    ("torch", "HalfStorage", Name::Storage(DType::F16)),
    ("torch", "BFloat16Storage", Name::Storage(DType::BF16)),
    ("torch", "DoubleStorage", Name::Storage(DType::F64)),
    ("torch", "LongStorage", Name::Storage(DType::I64)),
    ("torch", "IntStorage", Name::Storage(DType::I32)),
    ("torch", "ShortStorage", Name::Storage(DType::I16)),
    ("torch", "CharStorage", Name::Storage(DType::I8)),
];

/// Values by their number: one value may be in several places, and a list may even hold itself.
type Id = usize;

#[derive(Clone, Debug)]
enum Value {
    /// None, a truth value, a float: nothing that is looked at.
    Other,
    Int(i64),
    Text(String),
    Sequence(Vec<Id>),
    Dict(Vec<(Id, Id)>),
    Name(Name),
    Storage(Storage),
    Tensor {
        storage: Storage,
        offset: u64,
        sizes: Vec<u64>,
        strides: Vec<u64>,
    },
}

/// The tensors of a pickle: one, or those of a dictionary.
pub(super) fn tensors(pickle: &[u8]) -> Result<Vec<FoundTensor>> {
    let mut machine = Machine {
        bytes: pickle,
        at: 0,
        values: Vec::new(),
        stack: Vec::new(),
        marks: Vec::new(),
        memo: Vec::new(),
    };
    let top = machine.run()?;
    match machine.values.get(top) {
        Some(Value::Tensor { .. }) => Ok(vec![machine.tensor(top, String::new())?]),
        Some(Value::Dict(entries)) => {
            let mut tensors = Vec::new();
            for &(key, value) in entries {
                let Some(Value::Text(name)) = machine.values.get(key) else {
                    return Err(
                        "the dictionary has a key that is no text; a state dictionary of tensors is wanted"
                            .into(),
                    );
                };
                tensors.push(machine.tensor(value, name.clone())?);
            }
            Ok(tensors)
        }
        _ => Err("it holds neither a tensor nor a dictionary of tensors".into()),
    }
}

struct Machine<'a> {
    bytes: &'a [u8],
    at: usize,
    values: Vec<Value>,
    stack: Vec<Id>,
    /// Heights of the stack.
    marks: Vec<usize>,
    memo: Vec<Option<Id>>,
}

impl Machine<'_> {
    fn tensor(&self, id: Id, name: String) -> Result<FoundTensor> {
        match self.values.get(id) {
            Some(Value::Tensor { storage, offset, sizes, strides }) => Ok(FoundTensor {
                name,
                storage: storage.clone(),
                offset: *offset,
                sizes: sizes.clone(),
                strides: strides.clone(),
            }),
            _ => Err(format!("key `{name}` is no tensor; a state dictionary of tensors is wanted")),
        }
    }

    fn take(&mut self, count: usize) -> Result<&[u8]> {
        let end = self.at.checked_add(count).filter(|&end| end <= self.bytes.len());
        let end = end.ok_or("the pickle ends in the middle of a step")?;
        let taken = &self.bytes[self.at..end];
        self.at = end;
        Ok(taken)
    }

    fn number<const N: usize>(&mut self) -> Result<u64> {
        Ok(self.take(N)?.iter().rev().fold(0, |value, &byte| value << 8 | u64::from(byte)))
    }

    fn text(&mut self, length: u64) -> Result<String> {
        let bytes = self.take(usize::try_from(length).map_err(|_| "a text is too long")?)?;
        String::from_utf8(bytes.to_vec()).map_err(|_| "a text is not UTF-8".into())
    }

    fn line(&mut self) -> Result<String> {
        let rest = &self.bytes[self.at..];
        let length = rest.iter().position(|&byte| byte == b'\n').ok_or("the pickle ends inside a name")?;
        let line = self.text(length as u64)?;
        self.at += 1;
        Ok(line)
    }

    fn push(&mut self, value: Value) {
        self.values.push(value);
        self.stack.push(self.values.len() - 1);
    }

    fn pop(&mut self) -> Result<Id> {
        let floor = self.marks.last().copied().unwrap_or(0);
        match self.stack.len() > floor {
            true => self.stack.pop().ok_or_else(|| "a step takes more than there is".to_owned()),
            false => Err("a step takes more than there is".into()),
        }
    }

    /// Everything since the last mark.
    fn pop_mark(&mut self) -> Result<Vec<Id>> {
        let mark = self.marks.pop().ok_or("a step wants a mark, and there is none")?;
        Ok(self.stack.split_off(mark))
    }

    fn top(&self) -> Result<Id> {
        let floor = self.marks.last().copied().unwrap_or(0);
        self.stack
            .get(floor..)
            .and_then(<[Id]>::last)
            .copied()
            .ok_or_else(|| "a step takes more than there is".into())
    }

    fn tuple(&mut self, count: usize) -> Result<()> {
        let mut items = Vec::new();
        for _ in 0..count {
            items.push(self.pop()?);
        }
        items.reverse();
        self.push(Value::Sequence(items));
        Ok(())
    }

    fn memoize(&mut self, place: u64) -> Result<()> {
        let top = self.top()?;
        // Each place takes a step of its own, so there are never more than bytes.
        let place = usize::try_from(place).ok().filter(|&place| place <= self.bytes.len());
        let place = place.ok_or("a value is remembered under an impossible number")?;
        if self.memo.len() <= place {
            self.memo.resize(place + 1, None);
        }
        self.memo[place] = Some(top);
        Ok(())
    }

    fn recall(&mut self, place: u64) -> Result<()> {
        let id = usize::try_from(place).ok().and_then(|place| self.memo.get(place).copied().flatten());
        self.stack.push(id.ok_or("a value is asked for that was not remembered")?);
        Ok(())
    }

    fn name(&mut self, module: &str, name: &str) -> Result<()> {
        match NAMES.iter().find(|row| row.0 == module && row.1 == name) {
            Some(row) => {
                self.push(Value::Name(row.2));
                Ok(())
            }
            None => Err(format!(
                "its pickle names `{module}.{name}`, which is not on the list of what may be in a file of tensors: it was \
                 not run; save the tensors alone, as a state dictionary"
            )),
        }
    }

    /// Steps until the one that ends it; the value that is left.
    fn run(&mut self) -> Result<Id> {
        loop {
            let step = self.take(1)?[0];
            match step {
                0x80 => {
                    let version = self.number::<1>()?;
                    if version > 5 {
                        return Err(format!("its pickle has version {version}; up to 5 are known"));
                    }
                }
                0x95 => drop(self.number::<8>()?), // a frame's length: a hint for readers of streams
                b'.' => return self.pop(),
                b'(' => self.marks.push(self.stack.len()),
                b'0' => drop(self.pop()?),
                b'1' => drop(self.pop_mark()?),
                b'N' | 0x88 | 0x89 => self.push(Value::Other),
                b'G' => {
                    self.take(8)?;
                    self.push(Value::Other);
                }
                b'J' => {
                    let value = self.number::<4>()? as u32;
                    self.push(Value::Int(i64::from(value.cast_signed())));
                }
                b'K' => {
                    let value = self.number::<1>()?;
                    self.push(Value::Int(value as i64));
                }
                b'M' => {
                    let value = self.number::<2>()?;
                    self.push(Value::Int(value as i64));
                }
                0x8a => self.long()?,
                b'X' => {
                    let length = self.number::<4>()?;
                    let text = self.text(length)?;
                    self.push(Value::Text(text));
                }
                0x8c => {
                    let length = self.number::<1>()?;
                    let text = self.text(length)?;
                    self.push(Value::Text(text));
                }
                b'}' => self.push(Value::Dict(Vec::new())),
                b']' | b')' => self.push(Value::Sequence(Vec::new())),
                b't' => {
                    let items = self.pop_mark()?;
                    self.push(Value::Sequence(items));
                }
                0x85..=0x87 => self.tuple(usize::from(step - 0x84))?,
                b'a' => {
                    let item = self.pop()?;
                    self.append(vec![item])?;
                }
                b'e' => {
                    let items = self.pop_mark()?;
                    self.append(items)?;
                }
                b's' => {
                    let value = self.pop()?;
                    let key = self.pop()?;
                    self.insert(vec![key, value])?;
                }
                b'u' => {
                    let items = self.pop_mark()?;
                    self.insert(items)?;
                }
                b'q' => {
                    let place = self.number::<1>()?;
                    self.memoize(place)?;
                }
                b'r' => {
                    let place = self.number::<4>()?;
                    self.memoize(place)?;
                }
                0x94 => self.memoize(self.memo.len() as u64)?,
                b'h' => {
                    let place = self.number::<1>()?;
                    self.recall(place)?;
                }
                b'j' => {
                    let place = self.number::<4>()?;
                    self.recall(place)?;
                }
                b'c' => {
                    let (module, name) = (self.line()?, self.line()?);
                    self.name(&module, &name)?;
                }
                0x93 => {
                    let (name, module) = (self.pop()?, self.pop()?);
                    match (self.values.get(module).cloned(), self.values.get(name).cloned()) {
                        (Some(Value::Text(module)), Some(Value::Text(name))) => self.name(&module, &name)?,
                        _ => return Err("a name is no text".into()),
                    }
                }
                b'Q' => self.storage()?,
                b'R' => self.call()?,
                // Attributes of a dictionary, which `state_dict` has: they say nothing of tensors.
                b'b' => {
                    self.pop()?;
                    let top = self.top()?;
                    if !matches!(self.values.get(top), Some(Value::Dict(_))) {
                        return Err(
                            "its pickle builds an object, which is not done; save the tensors alone".into()
                        );
                    }
                }
                other => {
                    return Err(format!(
                        "its pickle has step 0x{other:02x} at byte {}, which no file of tensors needs",
                        self.at - 1
                    ));
                }
            }
        }
    }

    /// A whole number of up to 8 bytes.
    fn long(&mut self) -> Result<()> {
        let length = self.number::<1>()?;
        if length > 8 {
            return Err(format!("it has a whole number of {length} bytes"));
        }
        let bytes = self.take(length as usize)?;
        let negative = bytes.last().is_some_and(|&byte| byte >= 0x80);
        let mut whole = [if negative { 0xff } else { 0 }; 8];
        whole[..bytes.len()].copy_from_slice(bytes);
        self.push(Value::Int(i64::from_le_bytes(whole)));
        Ok(())
    }

    fn append(&mut self, items: Vec<Id>) -> Result<()> {
        let top = self.top()?;
        match &mut self.values[top] {
            Value::Sequence(list) => list.extend(items),
            _ => return Err("a value is appended to what is no list".into()),
        }
        Ok(())
    }

    fn insert(&mut self, items: Vec<Id>) -> Result<()> {
        let top = self.top()?;
        let Value::Dict(entries) = &mut self.values[top] else {
            return Err("a value is put into what is no dictionary".into());
        };
        let (pairs, []) = items.as_chunks::<2>() else { return Err("a key has no value".into()) };
        entries.extend(pairs.iter().map(|&[key, value]| (key, value)));
        Ok(())
    }

    /// The persistent id of a storage: ("storage", its class, its file, a device, its elements).
    fn storage(&mut self) -> Result<()> {
        let id = self.pop()?;
        let Some(Value::Sequence(parts)) = self.values.get(id) else {
            return Err("a storage has no description".into());
        };
        let parts: Vec<Option<&Value>> = parts.iter().map(|&part| self.values.get(part)).collect();
        let storage = match parts.as_slice() {
            [
                Some(Value::Text(kind)),
                Some(Value::Name(Name::Storage(dtype))),
                Some(Value::Text(key)),
                Some(Value::Text(_)),
                Some(Value::Int(elements)),
            ] if kind == "storage" => {
                let elements = u64::try_from(*elements).map_err(|_| "a storage has a negative length")?;
                Storage { key: key.clone(), dtype: *dtype, elements }
            }
            _ => return Err("a storage is described in an unknown way".into()),
        };
        self.push(Value::Storage(storage));
        Ok(())
    }

    /// What a call of one of the known names gives.
    fn call(&mut self) -> Result<()> {
        let (arguments, function) = (self.pop()?, self.pop()?);
        let Some(&Value::Name(name)) = self.values.get(function) else {
            return Err("its pickle calls what is no known name".into());
        };
        let Some(Value::Sequence(arguments)) = self.values.get(arguments) else {
            return Err("a call has no arguments".into());
        };
        let value = |at: usize| arguments.get(at).and_then(|&id| self.values.get(id));
        let made = match name {
            Name::OrderedDict if arguments.is_empty() => Value::Dict(Vec::new()),
            // The parameter's tensor; whether it is trained and its hooks do not matter.
            Name::RebuildParameter => match value(0) {
                Some(tensor @ Value::Tensor { .. }) => tensor.clone(),
                _ => return Err("a parameter is no tensor".into()),
            },
            Name::RebuildTensor => {
                let (Some(Value::Storage(storage)), Some(&Value::Int(offset))) = (value(0), value(1)) else {
                    return Err("a tensor has no storage".into());
                };
                let offset = u64::try_from(offset).map_err(|_| "a tensor has a negative offset")?;
                let numbers = |at: usize| match value(at) {
                    Some(Value::Sequence(list)) => {
                        list.iter().map(|&id| self.count(id)).collect::<Option<Vec<u64>>>()
                    }
                    _ => None,
                };
                let (Some(sizes), Some(strides)) = (numbers(2), numbers(3)) else {
                    return Err("a tensor's shape or strides are no whole numbers from 0".into());
                };
                if sizes.len() > 16 || strides.len() > 16 {
                    return Err("a tensor has more than 16 dimensions".into());
                }
                Value::Tensor { storage: storage.clone(), offset, sizes, strides }
            }
            Name::OrderedDict | Name::Storage(_) => {
                return Err("its pickle calls a known name in an unknown way".into());
            }
        };
        self.push(made);
        Ok(())
    }

    fn count(&self, id: Id) -> Option<u64> {
        match self.values.get(id) {
            Some(&Value::Int(value)) => u64::try_from(value).ok(),
            _ => None,
        }
    }
}
