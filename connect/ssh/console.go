package ssh

import (
	"errors"
	"io"
	"strings"

	"golang.org/x/crypto/ssh"

	"culvert.dev/connect/internal/mux"
)

// console serves a channel of the type session: it tells people what this is and which names
// they serve, and waits.
func (s *session) console(nc ssh.NewChannel) {
	defer s.closed()
	ch, requests, err := nc.Accept()
	if err != nil {
		return
	}
	defer ch.Close()
	left := make(chan struct{})
	defer close(left)
	shell, terminal := false, false
	var more chan string // to a shell
	defer func() {
		if more != nil {
			s.served.unwatch(more)
		}
	}()
	for r := range requests {
		if !s.spend(mux.CostFrame) {
			return
		}
		ok := false
		switch r.Type {
		case "pty-req":
			ok, terminal = !shell, true
		case "shell", "exec", "subsystem": // of a request that is refused, a client shows no text of the gateway
			ok, shell = !shell, true
		}
		_ = r.Reply(ok, nil)
		c := &console{ch, terminal}
		switch {
		case !ok || r.Type == "pty-req":
		case r.Type == "shell":
			var lines []string
			lines, more = s.served.watch()
			s.running.Go(func() { // the caller is one of running
				defer s.recovered()
				s.tell(c, s.greeting(lines), more, left)
			})
		default:
			_, _ = io.WriteString(ch.Stderr(), c.lines(noCommands))
			c.exit(exitNoCommands)
		}
	}
}

// A console is a channel of the type session with a shell.
type console struct {
	ch       ssh.Channel
	terminal bool
}

func (c *console) say(text string) bool {
	_, err := io.WriteString(c.ch, c.lines(text))
	return err == nil
}

// lines returns text as the client's terminal wants it.
func (c *console) lines(text string) string {
	if c.terminal {
		return strings.ReplaceAll(text, "\n", "\r\n")
	}
	return text
}

// exit ends the client's ssh with status.
func (c *console) exit(status uint32) {
	_, _ = c.ch.SendRequest("exit-status", false, ssh.Marshal(struct{ Status uint32 }{status}))
	_ = c.ch.Close()
}

// tell says the greeting, and then what comes from more until left is closed.
func (s *session) tell(c *console, greeting string, more <-chan string, left <-chan struct{}) {
	if !c.say(greeting) {
		return
	}
	s.running.Go(func() { // the caller is one of running
		defer s.recovered()
		c.wait()
	})
	for {
		select {
		case line := <-more:
			if !c.say(line + "\n") {
				return
			}
		case <-s.stopping:
			c.say("The gateway is stopping.\n")
			c.exit(exitStopping)
			return
		case <-left:
			return
		}
	}
}

// What is said of commands, sftp and scp, and the exit status of clients that ask for them.
const (
	noCommands     = "There are no commands and no file transfer here: use ssh -N with -L, -D, -W, -J or -R.\n"
	exitNoCommands = 1
)

// exitStopping is the exit status of clients that would do well to connect again: what runs
// ssh again, such as autossh, does so.
const exitStopping = 255

// wait returns when the client leaves. In a terminal nobody but the server sees Ctrl-C.
func (c *console) wait() {
	b := make([]byte, 64)
	for {
		n, err := c.ch.Read(b)
		switch {
		case c.terminal && (strings.ContainsAny(string(b[:n]), "\x03\x04") || errors.Is(err, io.EOF)):
			c.exit(0)
			return
		case err != nil:
			return // at the end of what it sends, the channel stays until the client closes it
		}
	}
}

// greeting is the first that a console says.
func (s *session) greeting(lines []string) string {
	me := "You are " + s.peer().ID + ". There is no shell here"
	if len(lines) == 0 {
		return me + ": use ssh -N with -L, -D, -W, -J or -R.\n"
	}
	return me + ". Callers reach registered names through this gateway as they do other services: by TLS, CONNECT, SOCKS5 or SSH.\n" +
		strings.Join(lines, "\n") + "\nThe names are yours until you leave, with Ctrl-C.\n"
}
