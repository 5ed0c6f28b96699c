//go:build linux

package main

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"syscall"
	"time"
)

// A suite is the whole benchmark: the processes it drives and what they did.
type suite struct {
	rig     rig
	peers   []*peer
	live    []*running
	rounds  int
	slice   time.Duration // of one measurement
	settle  time.Duration // between looks at memory
	rest    time.Duration // before the first of them: culvert gives up what only a tunnel that moves needs
	tunnels int           // held idle
	half    int           // hellos held half sent
	routes  int           // in a large table
	only    *regexp.Regexp
	log     io.Writer
	steps   []step
	role    string // of the load generator
	names   int    // that are asked for; 0 for all that there usually are

	load    *generator
	results results
	trouble []string // connections that failed
}

// A step is one thing that is done with each peer in turn. It returns the
// values of one or more rows.
type step struct {
	name  string
	bulk  bool // with the peers of bulk, too
	trips bool // with the peers of round trips, too
	logs  bool // with the peers of the defaults, too
	once  bool // in the first round alone: it takes long
	own   bool // with culvert alone

	shared  bool // with carriers whose tunnels share connections
	streams bool // with carriers of streams

	run func(ctx context.Context, s *suite, p *running) (map[string]float64, error)
}

// with reports whether the step is done with p.
func (st *step) with(p *peer) bool {
	switch {
	case st.own:
		return p.name == us
	case st.shared:
		return p.carrier.shared
	case st.streams:
		return !p.carrier.single
	}
	return (st.bulk || !p.bulk) && (st.trips || !p.trips) && (st.logs || !p.logs)
}

func steps() []step {
	var all []step
	for _, n := range []int{1, 64} {
		all = append(all, step{name: fmt.Sprintf("conns%d", n), logs: true, run: func(ctx context.Context, s *suite, p *running) (map[string]float64, error) {
			r, cpu, err := s.measure(ctx, p, job{Op: "conns", N: n})
			return map[string]float64{
				fmt.Sprintf("conns%d", n):    float64(r.Count) / r.Took.Seconds(),
				fmt.Sprintf("cpuconns%d", n): micros(cpu) / float64(r.Count),
			}, err
		}})
	}
	for _, n := range []int{1, 64} {
		all = append(all, step{name: fmt.Sprintf("trips%d", n), trips: true, run: func(ctx context.Context, s *suite, p *running) (map[string]float64, error) {
			r, cpu, err := s.measure(ctx, p, job{Op: "trips", N: n})
			return map[string]float64{
				fmt.Sprintf("trips%d", n):    float64(r.Count) / r.Took.Seconds(),
				fmt.Sprintf("p99trips%d", n): micros(r.P99),
				fmt.Sprintf("cputrips%d", n): micros(cpu) / float64(r.Count),
			}, err
		}})
	}
	for _, way := range []string{"up", "down"} {
		for _, n := range []int{1, 16} {
			id := fmt.Sprintf("%s%d", way, n)
			all = append(all, step{name: id, bulk: true, run: func(ctx context.Context, s *suite, p *running) (map[string]float64, error) {
				r, cpu, err := s.measure(ctx, p, job{Op: way, N: n})
				return map[string]float64{
					id:         float64(r.Bytes) / 1e6 / r.Took.Seconds(),
					"cpu" + id: cpu.Seconds() / (float64(r.Bytes) / 1e9),
				}, err
			}})
		}
	}
	return append(all,
		step{name: "idle", run: func(ctx context.Context, s *suite, p *running) (map[string]float64, error) {
			kib, fds, err := s.weigh(ctx, p.peer, "hold", s.tunnels)
			return map[string]float64{"idlemem": kib, "idlefds": fds}, err
		}},
		step{name: "half", run: func(ctx context.Context, s *suite, p *running) (map[string]float64, error) {
			kib, fds, err := s.weigh(ctx, p.peer, "half", s.half)
			return map[string]float64{"halfmem": kib, "halffds": fds}, err
		}},
		step{name: "rest", logs: true, once: true, run: restStep},
		step{name: "lines", own: true, run: linesStep},
		step{name: "routes", own: true, run: routesStep},
		step{name: "reload", own: true, run: reloadStep},
	)
}

func micros(d time.Duration) float64 { return float64(d) / 1e3 }

// measure does a job and returns what processor time it took the peer. Some
// work, closing most of all, trails behind the answer and is waited for. On a
// machine that is too busy to do anything in a slice, the job gets longer ones.
func (s *suite) measure(ctx context.Context, p *running, j job) (report, time.Duration, error) {
	var (
		r      report
		before time.Duration
		err    error
	)
	for j.Time = s.slice; ; j.Time *= 4 {
		before = cpu(p.pids)
		if r, err = s.do(ctx, p, j); err != nil {
			return r, 0, err
		}
		if r.Count > 0 || r.Bytes > 0 || r.Errors > 0 || r.Err != "" || j.Time >= patience {
			break
		}
	}
	if err := pause(ctx, 50*time.Millisecond); err != nil {
		return r, 0, err
	}
	if r.Count == 0 && r.Bytes == 0 {
		return r, 0, fmt.Errorf("nothing was done: %s", r.Err)
	}
	if r.Errors > 0 {
		s.trouble = append(s.trouble, fmt.Sprintf("%s, %s with %d: %d failed, the first with: %s", p.name, j.Op, j.N, r.Errors, r.Err))
	}
	return r, cpu(p.pids) - before, nil
}

// do does a job that goes through p.
func (s *suite) do(ctx context.Context, p *running, j job) (report, error) {
	j.To, j.Names = p.addr, cmp.Or(j.Names, s.names)
	if p.carrier != nil {
		j.Carrier = p.carrier.name
	}
	return s.load.do(ctx, j)
}

func pause(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-t.C:
		return nil
	}
}

// us is the peer that all this is about.
const us = "culvert"

// run starts all and goes through the rounds. Within a round each step is done
// with one peer after the other, so that what else the machine does meets all
// of them.
func (s *suite) run(ctx context.Context) error {
	stop, err := s.cast()
	if err != nil {
		return err
	}
	defer stop()
	var endSyslog func()
	if s.rig.syslog, endSyslog, err = startSyslog(); err != nil {
		return err
	}
	defer endSyslog()
	for _, p := range s.peers {
		run, err := p.start(ctx, s.rig)
		if err != nil {
			return err
		}
		defer run.stop()
		s.live = append(s.live, run)
		if _, err := s.do(ctx, run, job{Op: "conns", N: 16, Time: s.slice / 4}); err != nil {
			return fmt.Errorf("%s: warm up: %w", p.name, err)
		}
	}
	for round := range s.rounds {
		for _, st := range s.steps {
			if !s.only.MatchString(st.name) || st.once && round > 0 {
				continue
			}
			fmt.Fprintf(s.log, "round %d of %d: %s\n", round+1, s.rounds, st.name)
			for i := range s.live {
				p := s.live[(i+round)%len(s.live)] // another one first in each round
				if !st.with(p.peer) {
					continue
				}
				values, err := st.run(ctx, s, p)
				if err != nil {
					return fmt.Errorf("%s: %s: %w", p.name, st.name, err)
				}
				for row, v := range values {
					s.results.add(row, p.name, v)
				}
			}
		}
	}
	return s.lostLines(ctx)
}

// cast starts the backend and the load generator.
func (s *suite) cast() (stop func(), err error) {
	backend, err := startHelper("backend")
	if err != nil {
		return nil, err
	}
	if _, err := fmt.Fscanln(backend.out, &s.rig.backend); err != nil {
		backend.stop()
		return nil, fmt.Errorf("the backend's port: %w", err)
	}
	loader, err := startHelper(s.role)
	if err != nil {
		backend.stop()
		return nil, err
	}
	s.load = &generator{helper: loader}
	return func() {
		loader.stop()
		backend.stop()
	}, nil
}

// A helper is a process of this same program that takes part.
type helper struct {
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Reader
}

func startHelper(role string) (*helper, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(self, "-role", role)
	// One thread: it shares the cores with what is measured.
	cmd.Env = append(os.Environ(), "GOMAXPROCS=1")
	h, err := startCommand(cmd)
	if err != nil {
		return nil, fmt.Errorf("start the %s: %w", role, err)
	}
	return h, nil
}

// startCommand starts another program that takes part.
func startCommand(cmd *exec.Cmd) (h *helper, err error) {
	h = &helper{cmd: cmd}
	h.cmd.Stderr = os.Stderr
	h.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if h.in, err = h.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := h.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	h.out = bufio.NewReader(out)
	if err := h.cmd.Start(); err != nil {
		return nil, err
	}
	return h, nil
}

// stop ends the helper, which ends with its standard input.
func (h *helper) stop() {
	_ = h.in.Close()
	_ = h.cmd.Wait()
}

// A generator sends jobs to the load process.
type generator struct{ *helper }

func (g *generator) do(ctx context.Context, j job) (report, error) {
	if j.To == (netip.AddrPort{}) {
		j.To = netip.MustParseAddrPort("127.0.0.1:1") // of no use to the job, but it must parse
	}
	if err := ctx.Err(); err != nil {
		return report{}, err
	}
	line, err := json.Marshal(j)
	if err != nil {
		return report{}, err
	}
	if _, err := g.in.Write(append(line, '\n')); err != nil {
		return report{}, fmt.Errorf("the load generator is gone: %w", err)
	}
	answer, err := g.out.ReadBytes('\n')
	if err != nil {
		return report{}, fmt.Errorf("the load generator is gone: %w", err)
	}
	var r report
	if err := json.Unmarshal(answer, &r); err != nil {
		return r, fmt.Errorf("the load generator said %q: %w", strings.TrimSpace(string(answer)), err)
	}
	if r.Err != "" && r.Errors == 0 {
		return r, fmt.Errorf("%s with %d: %s", j.Op, j.N, r.Err)
	}
	return r, nil
}
