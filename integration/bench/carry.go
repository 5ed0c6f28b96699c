//go:build linux

package main

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"sync"
	"time"

	"culvert.dev/tunnel"
)

// A caller is the load generator of carriers: it reaches services as programs
// do, by culvert's own dialers, with a goroutine for each tunnel. It costs more
// than the one for SNI alone, and the same for every carrier.
type caller struct {
	carrier *carrier
	to      string

	dialer tunnel.Dialer // of the job, or of what is held
	held   []net.Conn

	mu     sync.Mutex // guards report and times
	report report
	times  []time.Duration
}

// carryMain runs jobs until standard input ends.
func carryMain() error {
	var c caller
	in, out := bufio.NewScanner(os.Stdin), json.NewEncoder(os.Stdout)
	for in.Scan() {
		var j job
		if err := json.Unmarshal(in.Bytes(), &j); err != nil {
			return fmt.Errorf("job %q: %w", in.Text(), err)
		}
		c.report, c.times = report{}, nil
		if err := c.run(context.Background(), j); err != nil && c.report.Err == "" {
			c.report.Err = err.Error()
		}
		if err := out.Encode(c.report); err != nil {
			return err
		}
	}
	return in.Err()
}

func (c *caller) run(ctx context.Context, j job) (err error) {
	if j.Op == "release" {
		c.release()
		return nil
	}
	if c.carrier, err = find(j.Carrier); err != nil {
		return err
	}
	c.to = j.To.String()
	if len(c.held) == 0 || c.dialer == nil {
		c.begin()
	}
	if j.Op != "hold" {
		defer c.release()
	}
	begin := time.Now()
	switch j.Op {
	case "conns":
		err = c.each(j.N, func(i int) error {
			for n := i; time.Since(begin) < j.Time; n += j.N {
				if err := c.once(ctx, n); err != nil {
					return err
				}
			}
			return nil
		})
	case "trips":
		err = c.trips(ctx, j)
	case "up", "down":
		err = c.bulk(ctx, j)
	case "hold":
		return c.hold(ctx, j.N)
	case "beside":
		err = c.beside(ctx, j)
	default:
		err = fmt.Errorf("no such job: %q", j.Op)
	}
	if c.report.Took == 0 {
		c.report.Took = time.Since(begin)
	}
	if len(c.times) > 0 {
		slices.Sort(c.times)
		c.report.P99, c.report.Max = c.times[len(c.times)*99/100], c.times[len(c.times)-1]
	}
	return err
}

func (c *caller) begin() {
	if c.carrier.dial != nil {
		c.dialer = c.carrier.dial(c.to)
	}
}

// release ends all that is held, and the connections it shares.
func (c *caller) release() {
	for _, conn := range c.held {
		_ = conn.Close()
	}
	c.held = nil
	if pool, ok := c.dialer.(io.Closer); ok {
		_ = pool.Close()
	}
	c.dialer = nil
}

// open opens a tunnel to service i and sends it a command.
func (c *caller) open(ctx context.Context, i int, cmd byte, arg uint64) (conn net.Conn, err error) {
	name := c.carrier.service(i % services)
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	if c.carrier.dial == nil {
		conn, err = new(net.Dialer).DialContext(ctx, "tcp", c.to)
	} else {
		conn, err = c.dialer.DialContext(ctx, "tcp", name+":443")
	}
	if err != nil {
		return nil, err
	}
	h, err := hello(name)
	if err == nil {
		_, err = conn.Write(opening(h, cmd, arg))
	}
	if err != nil {
		_ = conn.Close()
		return nil, err
	}
	return conn, nil
}

// trip sends a payload and waits for it to come back.
func trip(conn net.Conn, p []byte) error {
	if _, err := conn.Write(p); err != nil {
		return err
	}
	_, err := io.ReadFull(conn, p)
	return err
}

// echo opens a tunnel, sees that it carries, and closes all.
func (c *caller) echo(ctx context.Context) error {
	c.begin()
	defer c.release()
	return c.once(ctx, 0)
}

func (c *caller) once(ctx context.Context, i int) error {
	conn, err := c.open(ctx, i, cmdEcho, 0)
	if err != nil {
		return err
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(patience))
	if err := trip(conn, make([]byte, payloadLen)); err != nil {
		return err
	}
	c.count(1)
	return nil
}

func (c *caller) count(n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.report.Count += n
}

// each runs f so many times at once.
func (c *caller) each(n int, f func(i int) error) error {
	var wg sync.WaitGroup
	errs := make([]error, n)
	for i := range n {
		wg.Go(func() { errs[i] = f(i) })
	}
	wg.Wait()
	for _, err := range errs {
		if err != nil {
			c.report.Errors++
			if c.report.Err == "" {
				c.report.Err = err.Error()
			}
		}
	}
	return nil
}

// tunnels opens n that have carried an echo each.
func (c *caller) tunnels(ctx context.Context, n int) ([]net.Conn, error) {
	const atOnce = 16
	var wg sync.WaitGroup
	conns, errs := make([]net.Conn, n), make([]error, atOnce)
	for w := range atOnce {
		wg.Go(func() {
			for i := w; i < n && errs[w] == nil; i += atOnce {
				conn, err := c.open(ctx, i, cmdEcho, 0)
				if err == nil {
					conns[i] = conn
					_ = conn.SetDeadline(time.Now().Add(patience))
					err = trip(conn, make([]byte, payloadLen))
					_ = conn.SetDeadline(time.Time{})
				}
				errs[w] = err
			}
		})
	}
	wg.Wait()
	conns = slices.DeleteFunc(conns, func(c net.Conn) bool { return c == nil })
	c.held = append(c.held, conns...)
	return conns, errors.Join(errs...)
}

func (c *caller) hold(ctx context.Context, n int) error {
	conns, err := c.tunnels(ctx, n)
	c.report.Count = len(conns)
	return err
}

func (c *caller) trips(ctx context.Context, j job) error {
	conns, err := c.tunnels(ctx, j.N)
	if err != nil {
		return err
	}
	begin := time.Now()
	defer func() { c.report.Took = time.Since(begin) }()
	return c.each(j.N, func(i int) error { return c.turns(conns[i], begin.Add(j.Time), patience) })
}

// turns makes round trips until end, each in slack more at most.
func (c *caller) turns(conn net.Conn, end time.Time, slack time.Duration) (err error) {
	_ = conn.SetDeadline(end.Add(slack))
	p := make([]byte, payloadLen)
	var times []time.Duration
	for last := time.Now(); err == nil && last.Before(end); {
		err = trip(conn, p)
		now := time.Now()
		times = append(times, now.Sub(last))
		last = now
	}
	if slack == 0 && errors.Is(err, os.ErrDeadlineExceeded) {
		err = nil // the last one, which was not waited for
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.times = append(c.times, times...)
	c.report.Count += len(times)
	return err
}

// beside makes round trips beside a stream whose service takes nothing of it.
// One that does not come back counts as long as it was waited for.
func (c *caller) beside(ctx context.Context, j job) error {
	stalled, err := c.open(ctx, 1, cmdStall, 0)
	if err != nil {
		return err
	}
	conns, err := c.tunnels(ctx, j.N)
	if err != nil {
		return err
	}
	c.held = append(c.held, stalled)
	go func() {
		p := make([]byte, chunk)
		for err := error(nil); err == nil; {
			_, err = stalled.Write(p) // until it is closed
		}
	}()
	time.Sleep(300 * time.Millisecond) // which fills all there is to be filled
	return c.each(j.N, func(i int) error { return c.turns(conns[i], time.Now().Add(j.Time), 0) })
}

func (c *caller) bulk(ctx context.Context, j job) error {
	var sent uint64
	begin := time.Now()
	end := begin.Add(j.Time)
	err := c.each(j.N, func(i int) error {
		cmd, arg := byte(cmdUpload), uint64(0)
		if j.Op == "down" {
			cmd, arg = cmdDownload, uint64(j.Time.Milliseconds())
		}
		conn, err := c.open(ctx, i, cmd, arg)
		if err != nil {
			return err
		}
		defer conn.Close()
		_ = conn.SetDeadline(end.Add(patience))
		p := make([]byte, chunk)
		var moved, put uint64
		if cmd == cmdDownload {
			for err == nil {
				var n int
				n, err = conn.Read(p)
				moved += uint64(n)
				_ = conn.SetReadDeadline(time.Now().Add(patience)) // what is under way when the time is over may be much
			}
			if err == io.EOF {
				err = nil
			}
		} else {
			for more := true; err == nil && more; more = time.Now().Before(end) { // once, however long the others took to open
				var n int
				n, err = conn.Write(p)
				put += uint64(n)
			}
			if err == nil {
				err = conn.(interface{ CloseWrite() error }).CloseWrite()
			}
			var tail [8]byte
			if err == nil {
				_, err = io.ReadFull(conn, tail[:])
			}
			moved = binary.BigEndian.Uint64(tail[:])
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		sent += put
		c.report.Bytes += moved
		return err
	})
	if err == nil && c.report.Errors == 0 && j.Op == "up" && c.report.Bytes != sent {
		err = fmt.Errorf("the backend counted %d of %d bytes", c.report.Bytes, sent)
	}
	return err
}
