//! What a plug-in library offers before anything is opened: who it is, which devices it has, which options it takes.

use crate::backend::{ComputeBackend, DeviceDescription};
use crate::cache::CachePolicy;
use crate::options::{OptionTable, Schema};
use crate::planner::Planner;
use crate::storage::StorageTier;
use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use std::fmt;

/// Which of the four traits a plug-in implements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum PluginKind {
    /// [`ComputeBackend`].
    Compute,
    /// [`StorageTier`].
    Storage,
    /// [`CachePolicy`].
    Cache,
    /// [`Planner`].
    Planner,
}

impl PluginKind {
    /// Every kind.
    pub const ALL: [PluginKind; 4] =
        [PluginKind::Compute, PluginKind::Storage, PluginKind::Cache, PluginKind::Planner];

    /// Name, as in config, manifests and reports.
    pub fn name(self) -> &'static str {
        match self {
            PluginKind::Compute => "compute",
            PluginKind::Storage => "storage",
            PluginKind::Cache => "cache",
            PluginKind::Planner => "planner",
        }
    }

    /// Code at the plug-in boundary.
    pub fn code(self) -> u32 {
        match self {
            PluginKind::Compute => 1,
            PluginKind::Storage => 2,
            PluginKind::Cache => 3,
            PluginKind::Planner => 4,
        }
    }

    /// The kind with this code.
    pub fn from_code(code: u32) -> Option<PluginKind> {
        PluginKind::ALL.into_iter().find(|kind| kind.code() == code)
    }
}

impl fmt::Display for PluginKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Who a plug-in is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PluginInfo {
    /// The name that the config uses, unique within its kind: lower case letters, digits and `-`.
    pub name: String,
    /// The plug-in's own version.
    pub version: String,
    /// Who makes it.
    pub vendor: String,
    /// SPDX expression.
    pub license: String,
    /// One sentence for people.
    pub description: String,
    /// Compiler, target features and the like.
    pub build: String,
}

impl PluginInfo {
    /// Whether the name obeys the rule; checked by the loader.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] with the rule.
    pub fn check(&self) -> Result<()> {
        let ok = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        if self.name.is_empty() || self.name.len() > 64 || !self.name.chars().all(ok) {
            return Err(Error::invalid(format!(
                "plug-in name {:?} is not 1 to 64 lower case letters, digits and '-'",
                self.name
            )));
        }
        Ok(())
    }
}

/// Part that all modules share.
pub trait Module: Send + Sync {
    /// Who the plug-in is.
    fn info(&self) -> PluginInfo;
    /// The options of its table in the config, with types, defaults and documentation.
    fn schema(&self) -> Schema;
}

/// A library of compute devices.
pub trait ComputeModule: Module {
    /// The devices there are now, opened later by index. Cheap: allocates nothing on a device. An empty list is no
    /// error; why nothing was found is then said by `why_none`.
    ///
    /// # Errors
    /// Where the options are wrong or the driver fails.
    fn devices(&self, options: &OptionTable) -> Result<Vec<DeviceDescription>>;

    /// Why there are no devices, with a hint what to install, where `devices` is empty.
    fn why_none(&self) -> String {
        "the plug-in found no device and gives no reason".into()
    }

    /// Opens device `index` of `devices`.
    ///
    /// # Errors
    /// Where the options are wrong, the index is out of range, or the device cannot be had.
    fn open(&self, index: u32, options: &OptionTable) -> Result<Box<dyn ComputeBackend>>;
}

/// A storage tier.
pub trait StorageModule: Module {
    /// Opens the tier.
    ///
    /// # Errors
    /// Where the options are wrong or the system refuses what the tier needs.
    fn open(&self, options: &OptionTable) -> Result<Box<dyn StorageTier>>;
}

/// A cache policy.
pub trait CacheModule: Module {
    /// A fresh policy.
    ///
    /// # Errors
    /// Where the options are wrong.
    fn open(&self, options: &OptionTable) -> Result<Box<dyn CachePolicy>>;
}

/// A planner.
pub trait PlannerModule: Module {
    /// A planner.
    ///
    /// # Errors
    /// Where the options are wrong.
    fn open(&self, options: &OptionTable) -> Result<Box<dyn Planner>>;
}
