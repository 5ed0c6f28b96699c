//go:build linux

package main

import (
	"bufio"
	"cmp"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"syscall"
	"time"
)

// A job is what the load generator is told to do, a line of JSON on its
// standard input.
type job struct {
	Op    string         `json:"op"` // "conns", "trips", "up", "down", "beside", "hold", "half", "touch", "release"
	To    netip.AddrPort `json:"to"`
	N     int            `json:"n"`     // connections at once, or more connections to hold
	Time  time.Duration  `json:"time"`  // of measuring
	Names int            `json:"names"` // services to ask for in turn; 0 for all that there usually are
	Apart int            `json:"apart"` // how far they are from each other in the table; 0 for neighbours

	Carrier string `json:"carrier"` // how the proxy is asked, for a caller
}

// A report is its answer, a line of JSON on standard output.
type report struct {
	Count  int           `json:"count"` // connections or round trips done
	Bytes  uint64        `json:"bytes"` // that arrived
	Took   time.Duration `json:"took"`
	P99    time.Duration `json:"p99"`
	Max    time.Duration `json:"max"`    // the longest round trip
	Errors int           `json:"errors"` // connections that failed
	Err    string        `json:"err"`    // the first failure, or why nothing was done
}

// A load runs jobs from one event loop.
type load struct {
	poll   *poller
	echo   *opener // opening and payload
	head   int     // bytes of its hello
	half   []byte  // the first part of a hello
	buf    []byte
	zeros  []byte
	flows  []flow // by descriptor
	held   []int  // descriptors of "hold" and "half"
	serial int    // of connections
	names  int    // of the job
	apart  int    // likewise
	report report
}

// A flow is one connection of a job.
type flow struct {
	sent bool // the opening
	name int  // of the service it asks for
	got  int  // bytes of the round trip under way
	at   int64
	tail [8]byte
}

func newLoad() (*load, error) {
	poll, err := newPoller()
	if err != nil {
		return nil, err
	}
	l := &load{poll: poll, buf: make([]byte, 64<<10), zeros: make([]byte, chunk)}
	h, err := hello(serviceName(0))
	if err != nil {
		return nil, err
	}
	l.head = len(h)
	if l.echo, err = newOpener(append(opening(h, cmdEcho, 0), make([]byte, payloadLen)...)); err != nil {
		return nil, err
	}
	h, err = hello512(serviceName(0))
	if err != nil {
		return nil, err
	}
	l.half = h[:100]
	return l, nil
}

// loadMain runs jobs until standard input ends.
func loadMain() error {
	l, err := newLoad()
	if err != nil {
		return err
	}
	in, out := bufio.NewScanner(os.Stdin), json.NewEncoder(os.Stdout)
	for in.Scan() {
		var j job
		if err := json.Unmarshal(in.Bytes(), &j); err != nil {
			return fmt.Errorf("job %q: %w", in.Text(), err)
		}
		l.report = report{}
		if err := l.run(j); err != nil && l.report.Err == "" {
			l.report.Err = err.Error()
		}
		if err := out.Encode(l.report); err != nil {
			return err
		}
	}
	return in.Err()
}

func (l *load) run(j job) error {
	l.names, l.apart = cmp.Or(j.Names, services), cmp.Or(j.Apart, 1)
	switch j.Op {
	case "conns":
		return l.conns(j)
	case "trips":
		return l.trips(j)
	case "up", "down":
		return l.bulk(j)
	case "beside":
		return l.beside(j)
	case "hold":
		return l.hold(j)
	case "half":
		return l.halfOpen(j)
	case "touch":
		return l.touch()
	case "release":
		for _, fd := range l.held {
			closeFD(fd)
		}
		l.held = nil
		return nil
	}
	return fmt.Errorf("no such job: %q", j.Op)
}

func (l *load) failed(format string, args ...any) {
	l.report.Errors++
	if l.report.Err == "" {
		l.report.Err = fmt.Sprintf(format, args...)
	}
}

// open starts a connection and waits for it to stand.
func (l *load) open(to *syscall.SockaddrInet4) (int, error) {
	l.serial++
	fd, err := connectFD(to, l.serial)
	if err != nil {
		return -1, err
	}
	for fd >= len(l.flows) {
		l.flows = append(l.flows, flow{})
	}
	// A stride that is prime to any number of names: neighbours in the table
	// are not asked for one after the other.
	l.flows[fd] = flow{at: now(), name: l.serial * 7919 % l.names * l.apart}
	l.poll.add(fd, syscall.EPOLLOUT)
	return fd, nil
}

func now() int64 { return int64(time.Since(start)) }

var start = time.Now()

// greet sends the opening once the connection stands.
func (l *load) greet(fd int, p []byte) bool {
	if n, errno := writeFD(fd, p); n != len(p) {
		l.failed("send a hello: %d of %d bytes, %v", n, len(p), errno)
		return false
	}
	l.flows[fd].sent = true
	l.poll.mod(fd, syscall.EPOLLIN)
	return true
}

// answer takes what has come of a round trip and reports whether it is whole.
func (l *load) answer(fd int) (whole, ok bool) {
	n, errno := readFD(fd, l.buf[:payloadLen])
	if errno == syscall.EAGAIN {
		return false, true
	}
	if errno != 0 || n <= 0 {
		l.failed("wait for an echo: %d bytes, %v", n, errno)
		return false, false
	}
	f := &l.flows[fd]
	f.got += n
	return f.got >= payloadLen, true
}

const patience = 30 * time.Second // without any event

// events waits for events, and fails when none come for long.
func (l *load) events() ([]syscall.EpollEvent, error) {
	for range 10 {
		if evs := l.poll.wait(int(patience.Milliseconds()) / 10); len(evs) > 0 {
			return evs, nil
		}
	}
	return nil, fmt.Errorf("nothing happened for %v", patience)
}

// conns opens connections, j.N at a time: connect, hello, one echo, close.
func (l *load) conns(j job) error {
	to := sockaddr(j.To)
	begin := time.Now()
	end := begin.Add(j.Time)
	open := 0
	for open < j.N {
		if _, err := l.open(to); err != nil {
			return err
		}
		open++
	}
	for open > 0 {
		evs, err := l.events()
		if err != nil {
			return err
		}
		for _, ev := range evs {
			fd := int(ev.Fd)
			done, ok := false, true
			if l.flows[fd].sent {
				done, ok = l.answer(fd)
			} else {
				ok = l.greet(fd, l.echo.to(l.flows[fd].name))
			}
			if ok && !done {
				continue
			}
			closeFD(fd)
			open--
			if done {
				l.report.Count++
			}
			if time.Now().Before(end) && l.report.Errors < 1000 {
				if _, err := l.open(to); err != nil {
					return err
				}
				open++
			}
		}
	}
	l.report.Took = time.Since(begin)
	return nil
}

// establish opens j.N connections and brings each to its first echo, 64 at a
// time.
func (l *load) establish(j job) ([]int, error) {
	to := sockaddr(j.To)
	var fds []int
	open := 0
	for len(fds) < j.N {
		for open < min(64, j.N-len(fds)) {
			if _, err := l.open(to); err != nil {
				return fds, err
			}
			open++
		}
		evs, err := l.events()
		if err != nil {
			return fds, err
		}
		for _, ev := range evs {
			fd := int(ev.Fd)
			done, ok := false, true
			if l.flows[fd].sent {
				done, ok = l.answer(fd)
			} else {
				ok = l.greet(fd, l.echo.to(l.flows[fd].name))
			}
			if !ok {
				closeFD(fd)
				return fds, fmt.Errorf("after %d connections: %s", len(fds), l.report.Err)
			}
			if done {
				l.flows[fd].got = 0
				fds = append(fds, fd)
				open--
				if j.Op == "hold" {
					l.poll.del(fd)
				}
			}
		}
	}
	return fds, nil
}

// trips sends payloads to and fro on j.N connections, one under way on each.
func (l *load) trips(j job) error {
	fds, err := l.establish(j)
	defer func() {
		for _, fd := range fds {
			closeFD(fd)
		}
	}()
	if err != nil {
		return err
	}
	payload := l.zeros[:payloadLen]
	times := make([]int64, 0, 1<<20)
	begin := time.Now()
	for _, fd := range fds {
		l.flows[fd].at = now()
		writeFD(fd, payload)
	}
	end := now() + int64(j.Time)
	for at := now(); at < end; {
		evs, err := l.events()
		if err != nil {
			return err
		}
		for _, ev := range evs {
			fd := int(ev.Fd)
			whole, ok := l.answer(fd)
			if !ok {
				return fmt.Errorf("a connection ended after %d round trips", len(times))
			}
			if !whole {
				continue
			}
			f := &l.flows[fd]
			at = now()
			times = append(times, at-f.at)
			f.at, f.got = at, 0
			writeFD(fd, payload)
		}
	}
	l.report.Took = time.Since(begin)
	l.report.Count = len(times)
	slices.Sort(times)
	if len(times) > 0 {
		l.report.P99 = time.Duration(times[len(times)*99/100])
		l.report.Max = time.Duration(times[len(times)-1])
	}
	return nil
}

// bulk moves bytes on j.N connections, up to the backend or down from it.
func (l *load) bulk(j job) error {
	to := sockaddr(j.To)
	cmd, arg := byte(cmdUpload), uint64(0)
	if j.Op == "down" {
		cmd, arg = cmdDownload, uint64(j.Time.Milliseconds())
	}
	for range j.N {
		if _, err := l.open(to); err != nil {
			return err
		}
	}
	begin := time.Now()
	end := begin.Add(j.Time)
	var sent uint64
	for open := j.N; open > 0; {
		evs, err := l.events()
		if err != nil {
			return err
		}
		for _, ev := range evs {
			fd := int(ev.Fd)
			f := &l.flows[fd]
			done := false
			switch {
			case !f.sent:
				done = !l.greet(fd, opening(l.echo.to(f.name)[:l.head], cmd, arg))
				if cmd == cmdUpload {
					l.poll.mod(fd, syscall.EPOLLOUT)
				}
			case ev.Events&syscall.EPOLLOUT != 0:
				n, errno := writeFD(fd, l.zeros)
				switch {
				case errno == syscall.EAGAIN:
				case errno != 0:
					l.failed("send: %v", errno)
					done = true
				default:
					sent += uint64(n)
				}
				if !done && time.Now().After(end) {
					_ = syscall.Shutdown(fd, syscall.SHUT_WR)
					l.poll.mod(fd, syscall.EPOLLIN)
				}
			case cmd == cmdUpload:
				done = l.tail(fd, f)
			default:
				n, errno := dropFD(fd, 1<<20)
				switch {
				case errno == syscall.EAGAIN:
				case errno != 0:
					l.failed("receive: %v", errno)
					done = true
				case n == 0:
					done = true
				default:
					l.report.Bytes += uint64(n)
				}
			}
			if done {
				closeFD(fd)
				open--
			}
		}
	}
	l.report.Took = time.Since(begin)
	if cmd == cmdUpload && l.report.Bytes != sent {
		return fmt.Errorf("the backend counted %d of %d bytes", l.report.Bytes, sent)
	}
	return nil
}

// tail reads the backend's count of an upload.
func (l *load) tail(fd int, f *flow) (done bool) {
	n, errno := readFD(fd, f.tail[f.got:])
	switch {
	case errno == syscall.EAGAIN:
		return false
	case errno != 0 || n == 0:
		l.failed("wait for the backend's count: %d bytes, %v", n, errno)
		return true
	}
	if f.got += n; f.got < len(f.tail) {
		return false
	}
	l.report.Bytes += binary.BigEndian.Uint64(f.tail[:])
	return true
}

// hold leaves j.N more idle tunnels open.
func (l *load) hold(j job) error {
	fds, err := l.establish(j)
	l.held = append(l.held, fds...)
	l.report.Count = len(fds)
	return err
}

// touch sends a payload through every tunnel that is held and waits for all of
// them to come back.
func (l *load) touch() error {
	for _, fd := range l.held {
		l.flows[fd].got = 0
		l.poll.add(fd, syscall.EPOLLIN)
		if n, errno := writeFD(fd, l.zeros[:payloadLen]); n != payloadLen {
			return fmt.Errorf("a tunnel took %d bytes, %v", n, errno)
		}
	}
	for l.report.Count < len(l.held) {
		evs, err := l.events()
		if err != nil {
			return fmt.Errorf("after %d of %d tunnels: %w", l.report.Count, len(l.held), err)
		}
		for _, ev := range evs {
			whole, ok := l.answer(int(ev.Fd))
			if !ok {
				return fmt.Errorf("after %d of %d tunnels: %s", l.report.Count, len(l.held), l.report.Err)
			}
			if whole {
				l.poll.del(int(ev.Fd))
				l.report.Count++
			}
		}
	}
	return nil
}

// halfOpen leaves j.N more connections open that have sent a part of their
// hello.
func (l *load) halfOpen(j job) error {
	to := sockaddr(j.To)
	for range j.N {
		fd, err := l.open(to)
		if err != nil {
			return err
		}
		l.held = append(l.held, fd)
		if !l.stands(fd) || !l.greet(fd, l.half) {
			return fmt.Errorf("after %d connections: %s", len(l.held), l.report.Err)
		}
		l.poll.del(fd)
	}
	l.report.Count = j.N
	return nil
}

// stands waits for one connection to be writable.
func (l *load) stands(fd int) bool {
	evs, err := l.events()
	if err != nil || len(evs) != 1 || int(evs[0].Fd) != fd {
		l.failed("connect: %d events, %v", len(evs), err)
		return false
	}
	return true
}
