package command

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"culvert.dev/dns"
	"culvert.dev/internal/hostdns"
	"culvert.dev/registry"
	"culvert.dev/registry/file"
	"culvert.dev/tunnel"
)

// resolvConf is the file that programs of this host read.
const resolvConf = "/etc/resolv.conf"

// restoreCommand is what an agent starts to bring resolvConf back.
const restoreCommand = "restore-resolv-conf"

func newRestore() *cobra.Command {
	return &cobra.Command{
		Use: restoreCommand, Hidden: true, Args: args(0, "no arguments"),
		RunE: func(*cobra.Command, []string) error {
			signal.Ignore(append([]os.Signal{os.Interrupt, syscall.SIGTERM}, hangup)...) // the agent's, whose end is waited for
			return hostdns.Restore(resolvConf)
		},
	}
}

// agentLookup looks names up for an agent itself. Where resolvConf leads to the agent, it asks
// those that were there before.
func agentLookup(sockets tunnel.Sockets) func(ctx context.Context, host string) ([]netip.Addr, error) {
	plain, saved := &dns.Resolver{Sockets: sockets}, &dns.Resolver{Sockets: sockets, ResolvConf: hostdns.Saved(resolvConf)}
	return func(ctx context.Context, host string) ([]netip.Addr, error) {
		if _, err := os.Lstat(saved.ResolvConf); err == nil {
			return saved.Lookup(ctx, host)
		}
		return plain.Lookup(ctx, host)
	}
}

// A hostDNS is what the resolver of this host is told of an agent, as its file asks for.
type hostDNS struct {
	log     *slog.Logger
	changed chan struct{} // the table is another one; has room for one

	mu       sync.Mutex // guards what follows
	config   *file.Config
	table    func() *registry.Table // nil before follow
	resolved *hostdns.Resolved
	file     *hostdns.ResolvConf
	server   netip.AddrPort // in file
}

// use tells the resolver what c asks for. After an error it is told what it was told before, or
// nothing.
func (h *hostDNS) use(ctx context.Context, c *file.Config) (err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	install, s := "", hostdns.Settings{}
	h.config = c
	if c.Agent != nil && c.Agent.DNS != nil && c.Agent.DNS.Install != "" {
		install, s.Domains = c.Agent.DNS.Install, h.domains()
		if s.Server, err = netip.ParseAddrPort(c.Agent.DNS.UDPAddress()); err != nil {
			return err
		}
	}
	if h.resolved != nil && install == file.InstallResolved {
		return h.resolved.Set(ctx, s)
	}
	if h.file != nil && install == file.InstallResolvConf && h.server == s.Server {
		return nil
	}
	if err := h.takeBack(); err != nil {
		h.log.Warn("cannot take back the DNS of this host", "error", err)
	}
	switch install {
	case file.InstallResolved:
		if h.resolved, err = hostdns.UseResolved(ctx, s, h.log); err != nil {
			h.resolved = nil
			return err
		}
		h.log.Info("systemd-resolved asks the agent", "domains", s.Domains, "server", s.Server)
	case file.InstallResolvConf:
		self, err := os.Executable()
		if err != nil {
			return err
		}
		restore := exec.Command(self, restoreCommand)
		restore.Stderr = os.Stderr
		if h.file, err = hostdns.UseResolvConf(resolvConf, s, restore, h.log); err != nil {
			h.file = nil
			return err
		}
		h.server = s.Server
		h.log.Info("resolv.conf names the agent first", "file", resolvConf, "saved", hostdns.Saved(resolvConf), "server", s.Server)
	}
	return nil
}

// domains are those for which the agent is asked. The caller has locked h.mu.
func (h *hostDNS) domains() []string {
	if h.table == nil {
		return h.config.AgentDomains(nil)
	}
	return h.config.AgentDomains(h.table())
}

// onTable has what follow has started look at the names of the table. before is called, too.
func (h *hostDNS) onTable(before func()) func() {
	return func() {
		if before != nil {
			before()
		}
		select {
		case h.changed <- struct{}{}:
		default:
		}
	}
}

// hostDNSInterval is between two changes of the domains, at least.
const hostDNSInterval = time.Second

// follow has systemd-resolved ask for the names of the catalog as it changes, until stop is called.
func (h *hostDNS) follow(ctx context.Context, table func() *registry.Table) (stop func()) {
	h.mu.Lock()
	h.table = table
	h.mu.Unlock()
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			if err := h.update(ctx); err != nil && ctx.Err() == nil {
				h.log.Error("cannot change the DNS of this host; it stays as it is", "error", err)
			}
			select {
			case <-ctx.Done():
				return
			case <-time.After(hostDNSInterval):
			}
			select {
			case <-ctx.Done():
				return
			case <-h.changed:
			}
		}
	})
	return func() { cancel(); wg.Wait() }
}

// update tells systemd-resolved the domains of now.
func (h *hostDNS) update(ctx context.Context) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.resolved == nil {
		return nil
	}
	return h.resolved.SetDomains(ctx, h.domains())
}

// hostDNSError says what to do where the resolver could not be told.
func hostDNSError(err error) error {
	return &cliError{err: fmt.Errorf("have the resolver of this host ask the agent: %w", err), hint: "leave install out of agent.dns to run without it", code: exitFailed}
}

// takeBack ends what the resolver was told. The caller has locked h.mu.
func (h *hostDNS) takeBack() (err error) {
	if h.resolved != nil {
		err = h.resolved.Close()
		h.resolved = nil
		h.log.Info("systemd-resolved no longer asks the agent")
	}
	if h.file != nil {
		err = errors.Join(err, h.file.Close())
		h.file = nil
		h.log.Info("resolv.conf no longer names the agent", "file", resolvConf)
	}
	return err
}

// close takes everything back.
func (h *hostDNS) close() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if err := h.takeBack(); err != nil {
		h.log.Warn("cannot take back the DNS of this host", "error", err)
	}
}
