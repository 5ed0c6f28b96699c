//go:build linux

package reliability

import (
	"fmt"
	"io"
	"testing"
	"time"

	"culvert.dev/internal/testnet"
)

// The same program, built with the race detector, through a little of
// everything. A race is in its log and in its exit code, which every test
// looks at.
func TestRaces(t *testing.T) {
	chaosEnd, echoEnd := testnet.NewBackend(t), testnet.Echo(t)
	table := func(n int) string {
		return service("chaos.test", chaosEnd.Addr()) + service("echo.test", echoEnd.Addr()) +
			service("closed.test", closedPort(t, 1), closedPort(t, 2)) + service(fmt.Sprintf("g%d.test", n), echoEnd.Addr())
	}
	g := start(t, options{Services: table(0), More: drainConfig, Race: true})
	stays := g.tunnel(byConnect, 1, "echo.test")
	var n int
	eachWay(t, func(t *testing.T, w way) {
		chaos(t, g, w, chaosEnd, 16<<20)
		testnet.TestEndings(t, g.through(w, chaosEnd, "chaos.test"), testnet.Transparent())
		for range 3 {
			n++
			g.write(g.yaml(table(n)))
			crowd(t, 200, 16, func(i int) error {
				c, err := g.dial(i % 50)
				if err != nil {
					return err
				}
				defer c.Close()
				switch i % 4 {
				case 0:
					if err := w.enter(c, "echo.test"); err != nil {
						return err
					}
					return testnet.Abort(c)
				case 1:
					_, err = c.Write(w.preamble("echo.test")[:i%60])
					return err
				case 2:
					request(c, w.preamble("closed.test"))
				case 3:
					request(c, refusalCases()[i/4%len(refusalCases())].raw)
				}
				return nil
			})
			testnet.Eventually(t, patience, func() bool { return g.reaches(w, fmt.Sprintf("g%d.test", n)) }, "reload %d takes effect", n)
			for _, path := range []string{"/metrics", "/status", "/explain?name=echo.test"} {
				if _, _, err := g.get(path); err != nil {
					t.Error(err)
				}
			}
		}
	})
	if err := echo(stays, "still here"); err != nil {
		t.Error(err)
	}
	// And an end in disorder: half preambles, a tunnel, two signals.
	for i := range 20 {
		c := g.mustDial(i)
		if _, err := c.Write(bySNI.preamble("echo.test")[:i]); err != nil {
			t.Fatal(err)
		}
	}
	g.stop()
	_ = stays.SetReadDeadline(time.Now().Add(patience))
	if _, err := io.Copy(io.Discard, stays); !wasReset(err) {
		t.Errorf("the tunnel ended with %v, want a reset", err)
	}
}
