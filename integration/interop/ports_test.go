//go:build unix

package interop

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"culvert.dev/internal/testnet"
)

// A portsWorld is a gateway's configuration with ports for services.
type portsWorld struct {
	*world
	config, state string // paths
	addr          string // that all ports are at
	first         int
}

func newPortsWorld(t *testing.T) *portsWorld {
	w := newWorld(t)
	// An address and a range of its own, below the ports that the kernel gives
	// to connections by itself.
	return &portsWorld{
		world: w, config: filepath.Join(w.dir, "culvert.yaml"), state: filepath.Join(w.dir, "ports.json"),
		addr:  fmt.Sprintf("127.%d.%d.%d", 32+rand.IntN(32), rand.IntN(256), 1+rand.IntN(250)),
		first: 10000 + rand.IntN(10000),
	}
}

// write puts the configuration with these services in place, in one go.
func (w *portsWorld) write(t *testing.T, services map[string]string) {
	t.Helper()
	var b strings.Builder
	fmt.Fprintf(&b, "listeners: [{address: \"%s:9443\"}]\nservicePorts: {range: %d-%d, address: %s, state: ports.json}\n", w.addr, w.first, w.first+99, w.addr)
	b.WriteString("drain: {delay: 0s, timeout: 1s}\nlog: {format: json, level: debug}\nservices:\n  - {name: unused.example.test, ownPort: false, endpoints: [\"10.0.0.1:1\"]}\n")
	for name, endpoint := range services {
		fmt.Fprintf(&b, "  - {name: %s, endpoints: [\"%s\"]}\n", name, endpoint)
	}
	must(t, os.WriteFile(w.config+".new", []byte(b.String()), 0o600))
	must(t, os.Rename(w.config+".new", w.config))
}

func (w *portsWorld) start(t *testing.T) *gateway {
	t.Helper()
	return startGateway(t, "--config", w.config, "--admin", "127.0.0.1:0")
}

// A servicePort is what "culvert ports -o json" says.
type servicePort struct {
	Name     string
	Assigned int
	State    string
	Problem  string
}

// ports asks the gateway, by the command.
func (g *gateway) ports(t *testing.T) map[string]servicePort {
	t.Helper()
	out, errs, code := command(t, "culvert", "ports", "--admin", g.admin, "-o", "json")
	var list []servicePort
	if err := json.Unmarshal([]byte(out), &list); err != nil || code != 0 {
		t.Fatalf("culvert ports: exit code %d, %v, %q %s", code, err, out, errs)
	}
	all := map[string]servicePort{}
	for _, p := range list {
		all[p.Name] = p
	}
	return all
}

// at waits until the port of a service is open and returns its address.
func (w *portsWorld) at(t *testing.T, g *gateway, name string) string {
	t.Helper()
	var p servicePort
	g.await(t, "opened a port for "+name, func() bool { p = g.ports(t)[name]; return p.State == "open" })
	return net.JoinHostPort(w.addr, fmt.Sprint(p.Assigned))
}

// serveMail is a mail server, as much as clients need of one: RFC 5321.
func serveMail(t *testing.T, got chan<- string) string {
	return testnet.Serve(t, func(c net.Conn) {
		_, _ = io.WriteString(c, "220 mail.example.test ready\r\n")
		var data strings.Builder
		inData := false
		for sc := bufio.NewScanner(c); sc.Scan(); {
			line := sc.Text()
			answer := "250 fine"
			switch verb := strings.ToUpper(strings.SplitN(line+" ", " ", 2)[0]); {
			case inData && line == ".":
				inData = false
				got <- data.String()
			case inData:
				data.WriteString(line + "\n")
				continue
			case verb == "DATA":
				inData, answer = true, "354 go on"
			case verb == "QUIT":
				_, _ = io.WriteString(c, "221 bye\r\n")
				return
			}
			_, _ = io.WriteString(c, answer+"\r\n")
		}
	}).Addr()
}

// Servers that speak first are reached by real clients at ports of their own.
// The ports are the same after a reload, a restart and a kill.
func TestServersThatSpeakFirst(t *testing.T) {
	t.Parallel()
	w := newPortsWorld(t)
	keys, shell := w.sshd(t, "echo through the gateway")
	mails := make(chan string, 10)
	services := map[string]string{
		"shell.example.test": "127.0.0.1:" + shell,
		"mail.example.test":  serveMail(t, mails),
		"db.example.test":    w.mariadb(t),
		"down.example.test":  w.addr + ":1", // an address of this test's own
	}
	w.write(t, services)
	letter := w.world.write(t, "letter.txt", "Subject: hello\r\n\r\nthrough the gateway\r\n")
	var g *gateway
	before := map[string]string{}
	try := func(when string) {
		t.Helper()
		for name := range services {
			addr := w.at(t, g, name)
			if was := before[name]; was != "" && was != addr {
				t.Errorf("%s: %s is at %s, and was at %s", when, name, addr, was)
			}
			before[name] = addr
		}
		host, port, _ := net.SplitHostPort(before["shell.example.test"])
		out, errs, code := command(t, "ssh", "-F", "/dev/null", "-i", filepath.Join(keys, "client"), "-o", "BatchMode=yes",
			"-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "-o", "IdentitiesOnly=yes", "-p", port, host, "true")
		if out != "through the gateway\n" || code != 0 {
			t.Errorf("%s: ssh: exit code %d, got %q, %s", when, code, out, errs)
		}
		host, port, _ = net.SplitHostPort(before["mail.example.test"])
		for name, args := range map[string][]string{
			"curl":   {"curl", "-sS", "--noproxy", "*", "--mail-from", "a@example.test", "--mail-rcpt", "b@example.test", "-T", letter, "smtp://" + host + ":" + port},
			"Python": {"python3", "-c", "import smtplib,sys\ns=smtplib.SMTP(sys.argv[1],int(sys.argv[2]),timeout=60)\ns.sendmail('a@example.test','b@example.test','through the gateway')\ns.quit()", host, port},
		} {
			if _, errs, code := command(t, args[0], args[1:]...); code != 0 {
				t.Errorf("%s: %s: exit code %d, %s", when, name, code, errs)
				continue
			}
			mail := ""
			select {
			case mail = <-mails:
			case <-time.After(patience):
			}
			if !strings.Contains(mail, "through the gateway") {
				t.Errorf("%s: %s: got the mail %q", when, name, mail)
			}
		}
		if got, err := askMySQL(t, before["db.example.test"], mysqlPassword); got != mysqlAnswer || err != nil {
			t.Errorf("%s: MariaDB by Go: got %q, %v, want %q", when, got, err, mysqlAnswer)
		}
		if got := askMariaDB(t, before["db.example.test"], mysqlPassword); got != mysqlAnswer {
			t.Errorf("%s: MariaDB by its client: got %q, want %q", when, got, mysqlAnswer)
		}
	}
	g = w.start(t)
	try("at first")
	for name, want := range map[string]string{
		"mail.example.test": `it speaks first: "220 mail.example.test ready\r\n"`,
		"down.example.test": "the connection was closed without an answer",
	} {
		out, errs, code := command(t, "culvert", "probe", name, "--via", before[name], "--mode", "tcp", "--no-tls")
		if !strings.Contains(out, want) || (code == 0) != (name == "mail.example.test") {
			t.Errorf("probe of %s: exit code %d, got %q, %s", name, code, out, errs)
		}
	}
	if got := askMariaDB(t, before["db.example.test"], "guess"); !strings.HasPrefix(got, "ERROR 1045 ") {
		t.Errorf("MariaDB with a wrong password: got %q, want error 1045", got)
	}
	g.line(t, "logged a tunnel of ssh", func(l line) bool {
		return l.Proto == "tcp" && l.Service == "shell.example.test" && l.Reason == "done" && l.In > 0 && l.Out > 0
	})

	services["web.example.test"] = testnet.Greeting(t, "hello").Addr()
	w.write(t, services)
	w.at(t, g, "web.example.test")
	g.signal(syscall.SIGHUP)
	try("after a reload")

	g.signal(syscall.SIGTERM)
	g.awaitEnd(t)
	g = w.start(t)
	try("after a restart")

	g.signal(syscall.SIGKILL)
	g.awaitEnd(t)
	g = w.start(t)
	try("after a kill")
}

// Whenever a gateway is killed, what it has ever said of a service's port holds
// after that, and the state can be read.
func TestPortsSurviveKills(t *testing.T) {
	t.Parallel()
	const rounds, universe = 10, 30
	w := newPortsWorld(t)
	hello := testnet.Greeting(t, "hello").Addr()
	r := rand.New(rand.NewPCG(3, 4))
	known := map[string]int{}
	for round := range rounds {
		g := &gateway{}
		for change := range 4 {
			services := map[string]string{}
			for i := range universe {
				if r.IntN(3) > 0 {
					services[fmt.Sprintf("s%d.example.test", i)] = hello
				}
			}
			w.write(t, services)
			if change == 0 {
				g = w.start(t)
			}
			if change == 3 {
				break // in the middle of it
			}
			g.await(t, "opened the ports", func() bool {
				open := 0
				for name, p := range g.ports(t) {
					if p.State == "open" && services[name] != "" {
						open++
					}
				}
				return open == len(services)
			})
			for name, p := range g.ports(t) {
				if was := known[name]; was != 0 && was != p.Assigned {
					t.Errorf("round %d: %s has port %d, and had %d", round, name, p.Assigned, was)
				}
				known[name] = p.Assigned
			}
		}
		pause := time.NewTimer(time.Duration(r.IntN(150)) * time.Millisecond) // a reload takes about 100
		<-pause.C
		g.signal(syscall.SIGKILL)
		g.awaitEnd(t)
		if _, errs, code := command(t, "culvert", "ports", "--config", w.config); code != 0 {
			t.Fatalf("round %d: the state after a kill: %s", round, errs)
		}
	}
	var all []int
	for _, port := range known {
		all = append(all, port)
	}
	slices.Sort(all)
	if n := len(all); len(slices.Compact(all)) != n || n != universe {
		t.Errorf("%d services have %d ports, want %d of each", n, len(slices.Compact(all)), universe)
	}
}

// A port that another process takes while the gateway is down is said to be
// held, by the service's name; nobody else is given it, and the service has it
// back when it is free.
func TestPortTakenByAnotherProcess(t *testing.T) {
	w := newPortsWorld(t)
	w.write(t, map[string]string{"a.example.test": testnet.Greeting(t, "hello").Addr(), "b.example.test": testnet.Greeting(t, "hello").Addr()})
	g := w.start(t)
	addr, other := w.at(t, g, "a.example.test"), w.at(t, g, "b.example.test")
	g.signal(syscall.SIGTERM)
	g.awaitEnd(t)
	_, port, _ := net.SplitHostPort(addr)
	thief := start(t, "nc.openbsd", "-l", "-k", w.addr, port)
	thief.await(t, "taken the port", func() bool {
		_, _, code := command(t, "nc.openbsd", "-z", w.addr, port)
		return code == 0
	})
	g = w.start(t)
	if got := g.ports(t)["a.example.test"]; got.State != "held" || fmt.Sprint(got.Assigned) != port || !strings.Contains(got.Problem, "another process has the port") {
		t.Errorf("a port that is taken: %+v", got)
	}
	if got := w.at(t, g, "b.example.test"); got != other {
		t.Errorf("b is at %s, and was at %s", got, other)
	}
	g.line(t, "logged whose port is taken", func(l line) bool {
		return l.Msg == "service has no port" && l.Service == "tcp a.example.test" && strings.Contains(l.Err, "address already in use")
	})
	thief.signal(syscall.SIGKILL)
	thief.awaitEnd(t)
	if got := w.at(t, g, "a.example.test"); got != addr {
		t.Errorf("a is back at %s, and was at %s", got, addr)
	}
}
