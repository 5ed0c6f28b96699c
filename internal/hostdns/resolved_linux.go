package hostdns

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/godbus/dbus/v5"
)

// Names of systemd-resolved on the bus: org.freedesktop.resolve1(5).
const (
	resolvedName    = "org.freedesktop.resolve1"
	resolvedPath    = "/org/freedesktop/resolve1"
	resolvedManager = resolvedName + ".Manager."
)

const (
	busTimeout    = 10 * time.Second // of all calls that settings take
	linkWait      = 50 * time.Millisecond
	reconnectWait = time.Second
)

// A Resolved is what systemd-resolved was told.
type Resolved struct {
	dev  *device
	log  *slog.Logger
	stop context.CancelFunc
	wg   sync.WaitGroup

	mu       sync.Mutex // guards what follows
	settings Settings
	bus      *dbus.Conn // nil while there is none
}

// UseResolved has systemd-resolved ask s.Server for names in s.Domains, and nobody else. Other
// names go where they went. It tells it again when systemd-resolved or the bus have restarted.
// The caller closes the Resolved, which ends that; so does the end of the process.
func UseResolved(ctx context.Context, s Settings, log *slog.Logger) (*Resolved, error) {
	dev, err := newDevice()
	if err != nil {
		return nil, err
	}
	r := &Resolved{dev: dev, log: log, settings: s}
	signals, err := r.connect(ctx)
	if err != nil {
		_ = dev.Close()
		return nil, err
	}
	ctx, r.stop = context.WithCancel(context.WithoutCancel(ctx))
	r.wg.Go(func() { r.follow(ctx, signals) })
	return r, nil
}

// Set replaces the settings. After an error the next restart of systemd-resolved is told them.
func (r *Resolved) Set(ctx context.Context, s Settings) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.settings.equal(&s) {
		return nil
	}
	r.settings = s
	if r.bus == nil {
		return errors.New("the connection to the system bus is lost")
	}
	return r.tell(ctx)
}

// SetDomains replaces the domains of the settings, as Set does.
func (r *Resolved) SetDomains(ctx context.Context, domains []string) error {
	r.mu.Lock()
	s := r.settings
	r.mu.Unlock()
	s.Domains = domains
	return r.Set(ctx, s)
}

// Close takes the settings back.
func (r *Resolved) Close() error {
	r.stop()
	r.wg.Wait()
	if r.bus != nil {
		_ = r.bus.Close()
	}
	return r.dev.Close()
}

// connect connects to the bus and tells systemd-resolved the settings. What it returns has a
// signal when systemd-resolved starts or ends, and is closed when the connection ends.
func (r *Resolved) connect(ctx context.Context) (chan *dbus.Signal, error) {
	bus, err := dbus.ConnectSystemBus()
	if err != nil {
		return nil, fmt.Errorf("connect to the system bus: %w", err)
	}
	signals := make(chan *dbus.Signal, 16)
	bus.Signal(signals)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.bus = bus
	err = bus.AddMatchSignalContext(ctx, dbus.WithMatchInterface("org.freedesktop.DBus"), dbus.WithMatchMember("NameOwnerChanged"), dbus.WithMatchArg(0, resolvedName))
	if err == nil {
		err = r.tell(ctx)
	}
	if err != nil {
		_ = bus.Close()
		r.bus = nil
		return nil, err
	}
	return signals, nil
}

// follow tells the settings again until ctx is done.
func (r *Resolved) follow(ctx context.Context, signals chan *dbus.Signal) {
	for {
		select {
		case <-ctx.Done():
			return
		case s, ok := <-signals:
			if !ok {
				if signals = r.reconnect(ctx); signals == nil {
					return
				}
				continue
			}
			var name, old, owner string
			if dbus.Store(s.Body, &name, &old, &owner) != nil || name != resolvedName || owner == "" {
				continue
			}
			r.mu.Lock()
			err := r.tell(ctx)
			r.mu.Unlock()
			if err != nil {
				r.log.Warn("cannot set DNS of systemd-resolved after its restart", "error", err)
			} else {
				r.log.Info("set DNS of systemd-resolved after its restart", "interface", r.dev.name)
			}
		}
	}
}

// reconnect connects to the bus again. It returns nil when ctx is done.
func (r *Resolved) reconnect(ctx context.Context) chan *dbus.Signal {
	r.mu.Lock()
	_ = r.bus.Close()
	r.bus = nil
	r.mu.Unlock()
	r.log.Warn("connection to the system bus lost; connecting again")
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(reconnectWait):
		}
		if signals, err := r.connect(ctx); err == nil {
			return signals
		}
	}
}

// A server is a DNS server as systemd-resolved has it.
type server struct {
	Family  int32
	Address []byte
	Port    uint16
	Name    string // of its certificate
}

// A domain is one of a link.
type domain struct {
	Name    string
	Routing bool // and not searched
}

// tell tells systemd-resolved the settings. The caller has locked r.mu.
func (r *Resolved) tell(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, busTimeout)
	defer cancel()
	const inet, inet6 = 2, 10 // AF_INET, AF_INET6
	a := r.settings.Server.Addr().Unmap()
	family := int32(inet)
	if a.Is6() {
		family = inet6
	}
	domains := make([]domain, len(r.settings.Domains))
	for i, d := range r.settings.Domains {
		domains[i] = domain{d, true}
	}
	manager := r.bus.Object(resolvedName, resolvedPath)
	set := func(method string, value any) error {
		return manager.CallWithContext(ctx, resolvedManager+method, 0, int32(r.dev.index), value).Err
	}
	// The first call waits until systemd-resolved has heard of the interface.
	for {
		err := set("SetLinkDNSEx", []server{{family, a.AsSlice(), r.settings.Server.Port(), ""}})
		if err == nil {
			break
		}
		if e, ok := errors.AsType[dbus.Error](err); !ok || e.Name != resolvedName+".NoSuchLink" || ctx.Err() != nil {
			return resolvedError("SetLinkDNSEx", err)
		}
		select {
		case <-ctx.Done():
		case <-time.After(linkWait):
		}
	}
	// The server is on this host, in the clear, and nobody signs its names.
	for _, c := range []struct {
		method string
		value  any
	}{
		{"SetLinkDomains", domains}, {"SetLinkDefaultRoute", false}, {"SetLinkLLMNR", "no"}, {"SetLinkMulticastDNS", "no"},
		{"SetLinkDNSOverTLS", "no"}, {"SetLinkDNSSEC", "no"},
	} {
		if err := set(c.method, c.value); err != nil {
			return resolvedError(c.method, err)
		}
	}
	if err := manager.CallWithContext(ctx, resolvedManager+"FlushCaches", 0).Err; err != nil {
		return resolvedError("FlushCaches", err)
	}
	return nil
}

// resolvedError adds to an error of a call what to do.
func resolvedError(method string, err error) error {
	e, _ := errors.AsType[dbus.Error](err)
	switch e.Name {
	case "org.freedesktop.DBus.Error.AccessDenied", "org.freedesktop.DBus.Error.InteractiveAuthorizationRequired":
		err = fmt.Errorf("%w: run the agent as root, or have polkit allow its user the actions org.freedesktop.resolve1.set-*", err)
	case "org.freedesktop.DBus.Error.ServiceUnknown":
		err = fmt.Errorf("%w: is systemd-resolved enabled?", err)
	case "org.freedesktop.DBus.Error.UnknownMethod":
		err = fmt.Errorf("%w: systemd 246 or later is needed", err)
	}
	return fmt.Errorf("systemd-resolved: %s: %w", method, err)
}
