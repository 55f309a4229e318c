//! The pool that computes: a team of pinned threads that walk one job together, with barriers between its phases.
//!
//! Thread 0 is the caller of [`Pool::run`] (the backend's queue thread), the others are workers. Waiting is a short
//! spin, then a futex: spinning alone collapses where cores are shared. A panic or an error in one thread releases the
//! others from their barriers and becomes the job's error.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use engine_core::{Error, Result};
use rustix::thread::futex;

/// How long a thread spins before it sleeps.
pub(crate) const SPIN: Duration = Duration::from_micros(40);
/// Spins between two looks at the clock.
const SPINS_PER_LOOK: u32 = 64;

/// A number that threads wait on.
#[derive(Default)]
struct Signal {
    value: AtomicU32,
    sleepers: AtomicU32,
}

impl Signal {
    fn get(&self) -> u32 {
        self.value.load(SeqCst)
    }

    /// Adds one and wakes those who sleep.
    fn advance(&self) {
        self.value.fetch_add(1, SeqCst);
        if self.sleepers.load(SeqCst) > 0 {
            // A failing wake cannot happen with a valid address; sleepers look again in any case after a while.
            let _ = futex::wake(&self.value, futex::Flags::PRIVATE, u32::MAX >> 1);
        }
    }

    /// Returns once the value is not `seen`, which the caller read before.
    fn wait_beyond(&self, seen: u32) {
        let mut start = None;
        loop {
            for _ in 0..SPINS_PER_LOOK {
                if self.get() != seen {
                    return;
                }
                std::hint::spin_loop();
            }
            if start.get_or_insert_with(Instant::now).elapsed() > SPIN {
                break;
            }
        }
        self.sleepers.fetch_add(1, SeqCst);
        while self.get() == seen {
            // Returns when woken, when the value has changed already, or for no reason: the loop looks again.
            let _ = futex::wait(&self.value, futex::Flags::PRIVATE, seen, None);
        }
        self.sleepers.fetch_sub(1, SeqCst);
    }
}

/// A job, as the workers see it while [`Pool::run`] keeps it alive.
type Job<'a> = dyn Fn(&Worker<'_>) -> Result<(), Stopped> + Sync + 'a;

struct Team {
    size: usize,
    /// Advances with every job, and at shutdown.
    start: Signal,
    shutdown: AtomicBool,
    job: Mutex<Option<JobPointer>>,
    /// Workers that have not finished the present job.
    running: AtomicUsize,
    /// Advances when the last worker finishes.
    finished: Signal,
    arrived: AtomicUsize,
    /// Advances when all threads have arrived at a barrier, or one has failed.
    phase: Signal,
    failed: AtomicBool,
    failure: Mutex<Option<Error>>,
}

#[derive(Clone, Copy)]
struct JobPointer(*const Job<'static>);
// SAFETY: the job is `Sync`, and `Pool::run` does not return before every worker has let go of it.
unsafe impl Send for JobPointer {}

/// Another thread of the job has failed (or this one, having said so): leave the job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stopped;

/// One thread's view of a job.
pub(crate) struct Worker<'a> {
    team: &'a Team,
    /// This thread, `0..threads`.
    pub(crate) index: usize,
    /// Threads of the job.
    pub(crate) threads: usize,
}

impl Worker<'_> {
    /// Waits for all threads of the job.
    pub(crate) fn barrier(&self) -> Result<(), Stopped> {
        let team = self.team;
        if team.size > 1 {
            let seen = team.phase.get();
            if team.failed.load(SeqCst) {
                return Err(Stopped);
            }
            if team.arrived.fetch_add(1, SeqCst) + 1 == team.size {
                team.arrived.store(0, SeqCst);
                team.phase.advance();
            } else {
                team.phase.wait_beyond(seen);
            }
        }
        if team.failed.load(SeqCst) { Err(Stopped) } else { Ok(()) }
    }

    /// Ends the job with this error; the first one wins.
    pub(crate) fn fail(&self, error: Error) -> Stopped {
        self.team.fail(error);
        Stopped
    }

    /// This thread's fair share of `0..total` in units of `unit`: contiguous, by thread index.
    pub(crate) fn share(&self, total: usize, unit: usize) -> (usize, usize) {
        let units = total.div_ceil(unit);
        let start = units * self.index / self.threads;
        let end = units * (self.index + 1) / self.threads;
        ((start * unit).min(total), (end * unit).min(total))
    }
}

impl Team {
    fn fail(&self, error: Error) {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
        self.failed.store(true, SeqCst);
        self.phase.advance();
    }

    fn work(&self, index: usize, job: &Job<'_>) {
        let worker = Worker { team: self, index, threads: self.size };
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| job(&worker))) {
            let text = panic
                .downcast_ref::<&str>()
                .map(|s| (*s).to_owned())
                .or_else(|| panic.downcast_ref::<String>().cloned())
                .unwrap_or_else(|| "a panic without a message".into());
            self.fail(Error::panicked(format!("in thread {index} of the cpu pool: {text}")));
        }
    }

    fn serve(&self, index: usize) {
        let mut seen = 0;
        loop {
            self.start.wait_beyond(seen);
            seen = self.start.get();
            if self.shutdown.load(SeqCst) {
                return;
            }
            let job = *self.job.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(JobPointer(job)) = job {
                // SAFETY: `Pool::run` published the job and waits for `running` to reach zero.
                self.work(index, unsafe { &*job });
            }
            if self.running.fetch_sub(1, SeqCst) == 1 {
                self.finished.advance();
            }
        }
    }
}

/// The team and its worker threads.
pub(crate) struct Pool {
    team: Arc<Team>,
    workers: Vec<JoinHandle<()>>,
}

impl Pool {
    /// A team of `threads`, the calling thread included: the caller becomes thread 0 and is pinned, too.
    ///
    /// # Errors
    /// Where the system refuses a thread.
    pub(crate) fn new(threads: usize, processors: &[usize], pin: bool) -> Result<Pool> {
        let size = threads.max(1);
        let team = Arc::new(Team {
            size,
            start: Signal::default(),
            shutdown: AtomicBool::new(false),
            job: Mutex::new(None),
            running: AtomicUsize::new(0),
            finished: Signal::default(),
            arrived: AtomicUsize::new(0),
            phase: Signal::default(),
            failed: AtomicBool::new(false),
            failure: Mutex::new(None),
        });
        let mut pool = Pool { team, workers: Vec::new() };
        let processor = |index: usize| if pin { processors.get(index).copied() } else { None };
        for index in 1..size {
            let (team, processor) = (pool.team.clone(), processor(index));
            let worker = std::thread::Builder::new()
                .name(format!("cpu-{index}"))
                .spawn(move || {
                    pin_to(processor);
                    team.serve(index);
                })
                .map_err(|e| {
                    Error::out_of_memory(format!("thread {index} of {size} of the cpu pool: {e}"))
                })?;
            pool.workers.push(worker);
        }
        pin_to(processor(0));
        Ok(pool)
    }

    /// Runs a job on all threads and returns when all have left it.
    ///
    /// # Errors
    /// The first error that a thread reported, or its panic.
    pub(crate) fn run(&self, job: &Job<'_>) -> Result<()> {
        let team = &*self.team;
        // SAFETY: only the lifetime is erased; this function returns after every worker has left the job.
        let pointer = unsafe { std::mem::transmute::<*const Job<'_>, *const Job<'static>>(job) };
        *team.job.lock().unwrap_or_else(PoisonError::into_inner) = Some(JobPointer(pointer));
        let finished = team.finished.get();
        team.running.store(self.workers.len(), SeqCst);
        if !self.workers.is_empty() {
            team.start.advance();
        }
        team.work(0, job);
        if !self.workers.is_empty() {
            team.finished.wait_beyond(finished);
        }
        *team.job.lock().unwrap_or_else(PoisonError::into_inner) = None;
        team.arrived.store(0, SeqCst);
        team.failed.store(false, SeqCst);
        match team.failure.lock().unwrap_or_else(PoisonError::into_inner).take() {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.team.shutdown.store(true, SeqCst);
        self.team.start.advance();
        for worker in self.workers.drain(..) {
            // A worker catches its panics; there is nothing to report.
            let _ = worker.join();
        }
    }
}

/// Pins the calling thread; where the system refuses, it floats, which costs speed and nothing else.
fn pin_to(processor: Option<usize>) {
    if let Some(processor) = processor {
        let mut set = rustix::thread::CpuSet::new();
        set.set(processor);
        let _ = rustix::thread::sched_setaffinity(None, &set);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phases_see_each_other() {
        for threads in [1, 2, 5] {
            let pool = Pool::new(threads, &[], false).unwrap();
            let cells: Vec<AtomicUsize> = (0..threads).map(|_| AtomicUsize::new(0)).collect();
            for round in 1..200 {
                pool.run(&|worker| {
                    cells[worker.index].store(round, SeqCst);
                    worker.barrier()?;
                    let ok = cells.iter().all(|c| c.load(SeqCst) == round);
                    if !ok {
                        return Err(worker.fail(Error::internal("a phase began too early")));
                    }
                    worker.barrier()
                })
                .unwrap();
            }
        }
    }

    #[test]
    fn a_panic_or_error_ends_the_job_and_not_the_pool() {
        let pool = Pool::new(3, &[], false).unwrap();
        for failing in 0..3 {
            let error = pool
                .run(&|worker| {
                    worker.barrier()?;
                    assert!(worker.index != failing, "thread {failing} breaks");
                    worker.barrier()?;
                    worker.barrier()
                })
                .unwrap_err();
            assert!(matches!(&error, Error::Panicked { detail } if detail.contains("breaks")), "{error}");
            let error = pool
                .run(&|worker| {
                    if worker.index == failing {
                        return Err(worker.fail(Error::data("bad id")));
                    }
                    worker.barrier()
                })
                .unwrap_err();
            assert_eq!(error, Error::data("bad id"));
            pool.run(&|worker| worker.barrier()).unwrap();
        }
    }

    #[test]
    fn shares_cover_everything_once() {
        let pool = Pool::new(3, &[], false).unwrap();
        for (total, unit) in [(0, 4), (1, 4), (100, 32), (96, 32), (7, 1)] {
            let seen: Vec<AtomicUsize> = (0..total).map(|_| AtomicUsize::new(0)).collect();
            pool.run(&|worker| {
                let (start, end) = worker.share(total, unit);
                assert!(start % unit == 0 || start == total);
                for cell in &seen[start..end] {
                    cell.fetch_add(1, SeqCst);
                }
                Ok(())
            })
            .unwrap();
            assert!(seen.iter().all(|c| c.load(SeqCst) == 1));
        }
    }
}
