//! Counts that explain what a run did.

use crate::stages::StageTimes;
use engine_core::backend::Counter;
use serde::Serialize;

/// What devices and tier did during a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Statistics {
    /// Bytes of weights that one token reads where no neuron is skipped, by arithmetic.
    pub weight_bytes_per_token: u64,
    /// Bytes of weights on the devices (or viewed by them), each tensor once on each.
    pub weight_bytes: u64,
    /// Whether the device views the storage tier's memory instead of holding a copy.
    pub weights_imported: bool,
    /// Bytes of this session's KV caches.
    pub kv_bytes: u64,
    /// Bytes of keys and values that were moved from one device to another during the run.
    pub kv_bytes_moved: u64,
    /// Submissions made by this session during the run.
    pub submissions: u64,
    /// The same by device and part of the model, with their times.
    pub stages: Vec<StageTimes>,
    /// Share of neurons that were active while decoding, per layer; empty where they were not counted.
    pub active_neurons: Vec<f64>,
    /// Counters of devices and tier: the change during the run, and where that has no meaning (such as
    /// `bytes_allocated` and `threads`) the value after it.
    pub devices: Vec<DeviceCounters>,
}

/// Counters of one device or tier.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DeviceCounters {
    /// Name in the config.
    pub name: String,
    /// Name and value.
    pub counters: Vec<(String, u64)>,
}

impl DeviceCounters {
    /// From counters before and after. Amounts (`bytes_allocated...`, `threads`) are not differences.
    pub(crate) fn between(name: &str, before: &[Counter], after: Vec<Counter>) -> DeviceCounters {
        let value = |counter: &Counter| {
            let amount = counter.name.starts_with("bytes_allocated") || counter.name == "threads";
            let earlier = before.iter().find(|b| b.name == counter.name).map_or(0, |b| b.value);
            if amount { counter.value } else { counter.value.saturating_sub(earlier) }
        };
        let counters = after.iter().map(|counter| (counter.name.clone(), value(counter))).collect();
        DeviceCounters { name: name.to_owned(), counters }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_are_no_differences() {
        let counters = |values: [u64; 3]| {
            let names = ["submissions", "bytes_allocated_peak", "threads"];
            let counter = |(name, value): (&str, u64)| Counter { name: name.into(), value };
            names.into_iter().zip(values).map(counter).collect::<Vec<_>>()
        };
        let between = DeviceCounters::between("cpu", &counters([5, 100, 2]), counters([9, 120, 2]));
        let values: Vec<u64> = between.counters.iter().map(|counter| counter.1).collect();
        assert_eq!(values, [4, 120, 2]);
    }
}
