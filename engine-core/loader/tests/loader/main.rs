//! The loader against plug-ins that keep the contract and plug-ins that break it.

mod broken;
mod doors;
mod liars;
mod page;
mod search;
mod support;
mod versions;
