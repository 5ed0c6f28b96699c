//go:build linux

package main

import (
	"fmt"
	"slices"
	"syscall"
	"time"
)

// beside sends payloads to and fro on one connection while another one downloads all it can.
func (l *load) beside(j job) error {
	fds, err := l.establish(job{Op: j.Op, To: j.To, N: 1})
	defer func() {
		for _, fd := range fds {
			closeFD(fd)
		}
	}()
	if err != nil {
		return err
	}
	bulk, err := l.open(sockaddr(j.To))
	if err != nil {
		return err
	}
	fds = append(fds, bulk)
	payload := l.zeros[:payloadLen]
	var times []int64
	begin := time.Now()
	small, f := fds[0], &l.flows[fds[0]]
	f.at, f.got = now(), 0
	writeFD(small, payload)
	for end := now() + int64(j.Time); now() < end; {
		evs, err := l.events()
		if err != nil {
			return err
		}
		for _, ev := range evs {
			switch fd := int(ev.Fd); {
			case fd == bulk && !l.flows[fd].sent:
				// It lasts until it is closed.
				if !l.greet(fd, opening(l.echo.to(l.flows[fd].name)[:l.head], cmdDownload, uint64(time.Hour.Milliseconds()))) {
					return fmt.Errorf("the download: %s", l.report.Err)
				}
			case fd == bulk:
				n, errno := dropFD(fd, 1<<20)
				if errno != 0 && errno != syscall.EAGAIN || errno == 0 && n == 0 {
					return fmt.Errorf("the download ended after %d bytes: %v", l.report.Bytes, errno)
				}
				l.report.Bytes += uint64(max(n, 0))
			default:
				whole, ok := l.answer(fd)
				if !ok {
					return fmt.Errorf("a connection ended after %d round trips", len(times))
				}
				if !whole {
					continue
				}
				f := &l.flows[small]
				if l.report.Bytes > 0 { // those before are beside nothing
					times = append(times, now()-f.at)
				}
				f.at, f.got = now(), 0
				writeFD(fd, payload)
			}
		}
	}
	if len(times) == 0 {
		return fmt.Errorf("no round trip in %v beside a download of %d bytes", j.Time, l.report.Bytes)
	}
	l.report.Took, l.report.Count = time.Since(begin), len(times)
	slices.Sort(times)
	l.report.P99, l.report.Max = time.Duration(times[len(times)*99/100]), time.Duration(times[len(times)-1])
	return nil
}
