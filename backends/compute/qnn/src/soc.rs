//! Systems-on-chip by the number that the library knows them by, with their generation of Hexagon.

/// A system-on-chip.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Soc {
    pub(crate) number: u32,
    pub(crate) name: &'static str,
    /// Generation of the Hexagon processor.
    pub(crate) hexagon: u32,
}

const fn soc(number: u32, name: &'static str, hexagon: u32) -> Soc {
    Soc { number, name, hexagon }
}

const KNOWN: &[Soc] = &[
    soc(30, "SM8350", 68),
    soc(36, "SM8450", 69),
    soc(43, "SM8550", 73),
    soc(57, "SM8650", 75),
    soc(60, "SC8380XP", 73),
    soc(69, "SM8750", 79),
    soc(87, "SM8850", 81),
];

/// The first generation whose FullyConnected takes 4-bit codes with a scale per block.
const FOUR_BITS: u32 = 69;

/// The system-on-chip of this number, where it is known.
pub(crate) fn find(number: u32) -> Option<Soc> {
    KNOWN.iter().copied().find(|soc| soc.number == number)
}

/// Numbers and names of all that are known.
pub(crate) fn names() -> String {
    let names: Vec<String> = KNOWN.iter().map(|soc| format!("{} ({})", soc.number, soc.name)).collect();
    names.join(", ")
}

impl Soc {
    /// Whether its FullyConnected takes 4-bit codes with a scale per block. An unknown one is not asked: some combinations
    /// end the process instead of being refused.
    pub(crate) fn has_four_bits(of: Option<Soc>) -> bool {
        of.is_some_and(|soc| soc.hexagon >= FOUR_BITS)
    }
}
