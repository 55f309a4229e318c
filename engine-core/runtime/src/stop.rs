//! Holds back text that may turn out to be the beginning of a stop string, so that none is ever shown.

/// Watches a text for stop strings as it grows.
#[derive(Clone, Debug)]
pub(crate) struct StopWatch {
    stops: Vec<String>,
    held: String,
}

/// What a piece of text led to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Watched {
    /// Text that can be shown now.
    pub(crate) text: String,
    /// Whether a stop string was completed; everything from it on is dropped.
    pub(crate) stopped: bool,
}

impl StopWatch {
    /// Watches for these strings; empty ones are ignored.
    pub(crate) fn new(stops: &[String]) -> StopWatch {
        let stops = stops.iter().filter(|stop| !stop.is_empty()).cloned().collect();
        StopWatch { stops, held: String::new() }
    }

    /// Adds text.
    pub(crate) fn push(&mut self, text: &str) -> Watched {
        self.held.push_str(text);
        // The one that is complete first counts, however the text came in pieces.
        let complete = |stop: &String| self.held.find(stop.as_str()).map(|at| (at + stop.len(), at));
        if let Some((_, at)) = self.stops.iter().filter_map(complete).min() {
            self.held.truncate(at);
            return Watched { text: std::mem::take(&mut self.held), stopped: true };
        }
        let kept = self.stops.iter().map(|stop| self.beginning_of(stop)).max().unwrap_or(0);
        let shown = self.held.len() - kept;
        let rest = self.held.split_off(shown);
        Watched { text: std::mem::replace(&mut self.held, rest), stopped: false }
    }

    /// The text held back, which no stop string completed.
    pub(crate) fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// Bytes at the end of the held text that `stop` begins with, less than all of it.
    fn beginning_of(&self, stop: &str) -> usize {
        let mut lengths = stop.char_indices().map(|(at, _)| at).rev();
        lengths.find(|&length| self.held.ends_with(&stop[..length])).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn watch(stops: &[&str], pieces: &[&str]) -> (Vec<String>, bool) {
        let stops: Vec<String> = stops.iter().map(|stop| (*stop).to_owned()).collect();
        let mut watch = StopWatch::new(&stops);
        let mut shown = Vec::new();
        for piece in pieces {
            let watched = watch.push(piece);
            shown.push(watched.text);
            if watched.stopped {
                return (shown, true);
            }
        }
        shown.push(watch.finish());
        (shown, false)
    }

    #[test]
    fn holds_back_only_what_may_become_a_stop() {
        assert_eq!(watch(&[], &["a", "b"]), (vec!["a".into(), "b".into(), String::new()], false));
        assert_eq!(watch(&["END"], &["x E", "N", "D y"]), (vec!["x ".into(), "".into(), "".into()], true));
        assert_eq!(
            watch(&["END"], &["x E", "N", "d y"]),
            (vec!["x ".into(), "".into(), "ENd y".into(), String::new()], false)
        );
        assert_eq!(watch(&["END"], &["x EN"]), (vec!["x ".into(), "EN".into()], false));
        // The earliest one counts, and the longest beginning is held.
        assert_eq!(watch(&["cd", "bc"], &["abcd"]), (vec!["a".into()], true));
        assert_eq!(watch(&["abab", "ba"], &["abab"]), (vec!["a".into()], true));
        assert_eq!(watch(&["abab", "ba"], &["ab", "ab"]), (vec!["".into(), "a".into()], true));
        assert_eq!(watch(&["aab"], &["aaa", "b"]), (vec!["a".into(), "".into()], true));
        assert_eq!(watch(&["éa"], &["xé", "a"]), (vec!["x".into(), "".into()], true));
        assert_eq!(watch(&[""], &["a"]), (vec!["a".into(), String::new()], false));
    }

    proptest! {
        #[test]
        fn splitting_changes_nothing(
            text in "[ab]{0,20}",
            stops in prop::collection::vec("[ab]{1,4}", 0..3),
            cuts in prop::collection::vec(0usize..20, 0..6),
        ) {
            let complete = |stop: &String| text.find(stop.as_str()).map(|at| (at + stop.len(), at));
            let wanted = stops.iter().filter_map(complete).min();
            let mut cuts: Vec<usize> = cuts.into_iter().filter(|&cut| cut <= text.len()).collect();
            cuts.extend([0, text.len()]);
            cuts.sort_unstable();
            let mut watch = StopWatch::new(&stops);
            let (mut shown, mut stopped) = (String::new(), false);
            for pair in cuts.windows(2) {
                let watched = watch.push(&text[pair[0]..pair[1]]);
                shown.push_str(&watched.text);
                if watched.stopped {
                    stopped = true;
                    break;
                }
            }
            if !stopped {
                shown.push_str(&watch.finish());
            }
            prop_assert_eq!(stopped, wanted.is_some());
            prop_assert_eq!(shown, &text[..wanted.map_or(text.len(), |(_, at)| at)]);
        }
    }
}
