//! Descriptions, counts and planner requests, which cross as JSON: they are rare, and grow by new keys.

use engine_core::backend::{Counter, DeviceDescription, ToleranceClass};
use engine_core::module::PluginInfo;
use engine_core::planner::{Budget, HardwareProfile, ModelProfile};
use engine_core::storage::{CurvePoint, TierDescription};
use engine_core::{Error, Result};
use serde_json::{Map, Value, json};

/// Reads keys of one JSON object; absent keys take the default, wrong types are errors.
struct Object<'a> {
    what: &'a str,
    map: &'a Map<String, Value>,
}

impl<'a> Object<'a> {
    fn of(value: &'a Value, what: &'a str) -> Result<Object<'a>> {
        let map = value.as_object().ok_or_else(|| wrong(what, "it is no JSON object"))?;
        Ok(Object { what, map })
    }

    fn get<T>(&self, key: &str, default: Option<T>, read: impl Fn(&Value) -> Option<T>) -> Result<T> {
        match (self.map.get(key), default) {
            (Some(value), _) => read(value)
                .ok_or_else(|| wrong(self.what, &format!("`{key}` is {value}, which is of the wrong type"))),
            (None, Some(default)) => Ok(default),
            (None, None) => Err(wrong(self.what, &format!("`{key}` is absent"))),
        }
    }

    fn text(&self, key: &str, default: Option<&str>) -> Result<String> {
        self.get(key, default.map(str::to_owned), |v| v.as_str().map(str::to_owned))
    }

    fn number(&self, key: &str, default: u64) -> Result<u64> {
        self.get(key, Some(default), Value::as_u64)
    }

    fn flag(&self, key: &str) -> Result<bool> {
        self.get(key, Some(false), Value::as_bool)
    }

    fn texts(&self, key: &str) -> Result<Vec<String>> {
        self.get(key, Some(Vec::new()), |v| {
            v.as_array()?.iter().map(|item| item.as_str().map(str::to_owned)).collect()
        })
    }
}

fn wrong(what: &str, problem: &str) -> Error {
    Error::internal(format!("its {what} is malformed: {problem}"))
}

fn parse(text: &str, what: &str) -> Result<Value> {
    serde_json::from_str(text).map_err(|error| wrong(what, &error.to_string()))
}

/// Who a plug-in is.
pub fn info_to_json(info: &PluginInfo) -> String {
    json!({
        "name": info.name,
        "version": info.version,
        "vendor": info.vendor,
        "license": info.license,
        "description": info.description,
        "build": info.build,
    })
    .to_string()
}

/// The reverse of [`info_to_json`]; only the name is required.
///
/// # Errors
/// [`Error::Internal`] naming the key, [`Error::InvalidArgument`] for a name that breaks the rule.
pub fn info_from_json(text: &str) -> Result<PluginInfo> {
    let value = parse(text, "info")?;
    let object = Object::of(&value, "info")?;
    let info = PluginInfo {
        name: object.text("name", None)?,
        version: object.text("version", Some(""))?,
        vendor: object.text("vendor", Some(""))?,
        license: object.text("license", Some(""))?,
        description: object.text("description", Some(""))?,
        build: object.text("build", Some(""))?,
    };
    info.check()?;
    Ok(info)
}

fn device_value(device: &DeviceDescription) -> Value {
    json!({
        "name": device.name,
        "description": device.description,
        "tolerance": device.tolerance.name(),
        "memory_bytes": device.memory_bytes,
        "alignment": device.alignment,
        "imports_host_memory": device.imports_host_memory,
        "needs_constant_weights": device.needs_constant_weights,
        "max_buffer_bytes": device.max_buffer_bytes,
        "notes": device.notes,
    })
}

fn device_of(value: &Value) -> Result<DeviceDescription> {
    let what = "device description";
    let object = Object::of(value, what)?;
    let classes = [ToleranceClass::Exact64, ToleranceClass::F32, ToleranceClass::F16];
    let class = object.text("tolerance", None)?;
    let tolerance = classes
        .into_iter()
        .find(|c| c.name() == class)
        .ok_or_else(|| wrong(what, &format!("`tolerance` is {class:?}, wanted f64, f32 or f16")))?;
    let alignment = object.number("alignment", 1)?;
    if !alignment.is_power_of_two() {
        return Err(wrong(what, &format!("`alignment` is {alignment}, wanted a power of two")));
    }
    Ok(DeviceDescription {
        name: object.text("name", None)?,
        description: object.text("description", Some(""))?,
        tolerance,
        memory_bytes: object.number("memory_bytes", 0)?,
        alignment,
        imports_host_memory: object.flag("imports_host_memory")?,
        needs_constant_weights: object.flag("needs_constant_weights")?,
        max_buffer_bytes: object.number("max_buffer_bytes", 0)?,
        notes: object.texts("notes")?,
    })
}

/// What a device is.
pub fn device_to_json(device: &DeviceDescription) -> String {
    device_value(device).to_string()
}

/// The reverse of [`device_to_json`]; name and tolerance are required, alignment is 1 where it is absent.
///
/// # Errors
/// [`Error::Internal`] naming the key.
pub fn device_from_json(text: &str) -> Result<DeviceDescription> {
    device_of(&parse(text, "device description")?)
}

/// The devices that a plug-in has.
pub fn devices_to_json(devices: &[DeviceDescription]) -> String {
    Value::Array(devices.iter().map(device_value).collect()).to_string()
}

/// The reverse of [`devices_to_json`].
///
/// # Errors
/// [`Error::Internal`] naming the key.
pub fn devices_from_json(text: &str) -> Result<Vec<DeviceDescription>> {
    let value = parse(text, "list of devices")?;
    let items = value.as_array().ok_or_else(|| wrong("list of devices", "it is no JSON array"))?;
    items.iter().map(device_of).collect()
}

/// What a storage tier is.
pub fn tier_to_json(tier: &TierDescription) -> String {
    let curve: Vec<Value> = tier
        .curve
        .iter()
        .map(|p| json!({"block_bytes": p.block_bytes, "depth": p.depth, "bytes_per_second": p.bytes_per_second}))
        .collect();
    json!({
        "name": tier.name,
        "description": tier.description,
        "alignment": tier.alignment,
        "granularity": tier.granularity,
        "resident": tier.resident,
        "max_depth": tier.max_depth,
        "curve": curve,
        "notes": tier.notes,
    })
    .to_string()
}

/// The reverse of [`tier_to_json`]; the name is required, numbers are 1 where they are absent.
///
/// # Errors
/// [`Error::Internal`] naming the key.
pub fn tier_from_json(text: &str) -> Result<TierDescription> {
    let what = "tier description";
    let value = parse(text, what)?;
    let object = Object::of(&value, what)?;
    let point = |value: &Value| {
        Some(CurvePoint {
            block_bytes: value.get("block_bytes")?.as_u64()?,
            depth: u32::try_from(value.get("depth")?.as_u64()?).ok()?,
            bytes_per_second: value.get("bytes_per_second")?.as_f64()?,
        })
    };
    let alignment = object.number("alignment", 1)?;
    if !alignment.is_power_of_two() {
        return Err(wrong(what, &format!("`alignment` is {alignment}, wanted a power of two")));
    }
    Ok(TierDescription {
        name: object.text("name", None)?,
        description: object.text("description", Some(""))?,
        alignment,
        granularity: object.number("granularity", 1)?.max(1),
        resident: object.flag("resident")?,
        max_depth: u32::try_from(object.number("max_depth", 1)?).unwrap_or(u32::MAX).max(1),
        curve: object.get("curve", Some(Vec::new()), |v| v.as_array()?.iter().map(point).collect())?,
        notes: object.texts("notes")?,
    })
}

/// Named counts.
pub fn counters_to_json(counters: &[Counter]) -> String {
    let map: Map<String, Value> = counters.iter().map(|c| (c.name.clone(), c.value.into())).collect();
    Value::Object(map).to_string()
}

/// The reverse of [`counters_to_json`].
///
/// # Errors
/// [`Error::Internal`] naming the key.
pub fn counters_from_json(text: &str) -> Result<Vec<Counter>> {
    let value = parse(text, "counters")?;
    let object = Object::of(&value, "counters")?;
    object
        .map
        .iter()
        .map(|(name, value)| {
            let value = value
                .as_u64()
                .ok_or_else(|| wrong("counters", &format!("`{name}` is {value}, no whole number")))?;
            Ok(Counter { name: name.clone(), value })
        })
        .collect()
}

/// A planner's question.
///
/// # Errors
/// [`Error::InvalidArgument`] where a profile holds a number that is not finite.
pub fn request_to_json(model: &ModelProfile, hardware: &HardwareProfile, budget: &Budget) -> Result<String> {
    let finite = model.layers.iter().all(|l| l.frequency.iter().all(|f| f.is_finite()))
        && hardware.devices.iter().all(|d| d.bandwidth.is_finite() && d.sync_seconds.is_finite())
        && budget.slowdown.is_finite();
    if !finite {
        return Err(Error::invalid("a profile or the budget holds a number that is not finite"));
    }
    Ok(json!({"model": model, "hardware": hardware, "budget": budget}).to_string())
}

/// The reverse of [`request_to_json`].
///
/// # Errors
/// [`Error::InvalidArgument`] naming what is missing.
pub fn request_from_json(text: &str) -> Result<(ModelProfile, HardwareProfile, Budget)> {
    let malformed = |error: serde_json::Error| Error::invalid(format!("the request is malformed: {error}"));
    let mut value: Value = serde_json::from_str(text).map_err(malformed)?;
    let mut take = |key: &str| value.get_mut(key).map(Value::take).unwrap_or(Value::Null);
    Ok((
        serde_json::from_value(take("model")).map_err(malformed)?,
        serde_json::from_value(take("hardware")).map_err(malformed)?,
        serde_json::from_value(take("budget")).map_err(malformed)?,
    ))
}
