//! Moves keys and values of a layer from one device to another, through the canonical layout.

use super::{Bind, Program, Stage, StageKind};
use crate::{Result, RuntimeError};
use engine_core::operation::{Arithmetic, OperationKind, OperationList, Place, Slot, SlotId, SlotRole};
use engine_core::{DType, TensorType};

/// What a move depends on: moves that agree in it are one program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Move {
    /// Index of the device with the cache that is read.
    pub(crate) from: u32,
    /// Index of the device with the cache that is filled.
    pub(crate) to: u32,
    pub(crate) kv_heads: u32,
    pub(crate) head_dim: u32,
    /// Positions of either cache.
    pub(crate) context: u32,
}

/// Bytes of keys and values that are moved at once, at most, where one position is not more: so that a move needs as much
/// memory for a long sequence as for a short one, and every length goes through the same list.
const PIECE: u64 = 1 << 19;

impl Move {
    /// Positions that are moved at once.
    pub(crate) fn positions(self) -> u32 {
        let position = u64::from(self.kv_heads) * u64::from(self.head_dim) * 4;
        let most = u32::try_from(PIECE / position.max(1)).unwrap_or(u32::MAX);
        most.clamp(1, self.context.max(1))
    }

    /// The way back.
    pub(crate) fn back(self) -> Move {
        Move { from: self.to, to: self.from, ..self }
    }

    /// The program, which moves [`Move::positions`] positions or fewer, from where the sequence is bound to begin: caches are
    /// bound as 0, which is read, and 1.
    ///
    /// # Errors
    /// Where a cache of this shape cannot be.
    pub(crate) fn program(self) -> Result<Program> {
        let build = |export: bool| self.list(export);
        let failed = RuntimeError::device("host", "moving the KV cache");
        let (export, export_binds) = build(true).map_err(&failed)?;
        let (import, import_binds) = build(false).map_err(&failed)?;
        let columns = u64::from(self.kv_heads) * u64::from(self.head_dim);
        let bytes = u64::from(self.positions()) * columns * 2;
        let stage =
            |kind, device, list, binds, waits| Stage { device, kind, list, binds, ranges: vec![], waits };
        let kind = |device, what: &str| StageKind { device, what: what.into() };
        Ok(Program {
            stages: vec![
                stage(0, self.from, export, export_binds, vec![]),
                stage(1, self.to, import, import_binds, vec![0]),
            ],
            kinds: vec![kind(self.from, "kv_export"), kind(self.to, "kv_import")],
            exchanges: vec![bytes, bytes],
            kept: Vec::new(),
            weights: Default::default(),
            caches: Vec::new(),
            active: Vec::new(),
            observed: Vec::new(),
        })
    }

    fn list(self, export: bool) -> engine_core::Result<(OperationList, Vec<(SlotId, Bind)>)> {
        let Move { kv_heads, head_dim, .. } = self;
        let columns = u64::from(kv_heads) * u64::from(head_dim);
        let cache = TensorType::matrix(DType::F16, self.context.into(), 2 * columns)?;
        let rows = TensorType::matrix(DType::F16, self.positions().into(), columns)?;
        let mut list = OperationList::new(1);
        let cache = list.fixed("KV cache", SlotRole::State, cache);
        let mut binds = vec![(cache, Bind::Cache(if export { 0 } else { 1 }))];
        let names = ["keys", "values"];
        let inner = names.map(|name| list.fixed(name, SlotRole::Scratch, rows));
        let role = if export { SlotRole::Output } else { SlotRole::Input };
        let host = names.map(|name| {
            let name = format!("{name} on the host");
            list.add_slot(Slot { name, role, place: Place::Host, tensor: rows, per_token: false })
        });
        binds.extend(host.into_iter().enumerate().map(|(at, slot)| (slot, Bind::Exchange(at))));
        let [key, value] = inner;
        if export {
            let kind = OperationKind::KvExport { cache, key, value, kv_heads, head_dim };
            list.push("kv_export", kind, Arithmetic::F32);
        }
        for (inner, host) in inner.into_iter().zip(host) {
            let (from, to) = if export { (inner, host) } else { (host, inner) };
            list.push("kv copy", OperationKind::Copy { from, to }, Arithmetic::F32);
        }
        if !export {
            let kind = OperationKind::KvImport { key, value, cache, kv_heads, head_dim };
            list.push("kv_import", kind, Arithmetic::F32);
        }
        list.validate()?;
        Ok((list, binds))
    }
}
