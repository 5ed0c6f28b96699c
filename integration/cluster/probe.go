package cluster

import (
	"bytes"
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// impatience is how often is asked before the first answer that is good: a real
// kubelet waits for a whole period, which tests would only wait for.
const impatience = 100 * time.Millisecond

// probe watches a process until ctx ends. Without a readiness probe a
// container is ready when its ports are bound, which a kubelet would not wait
// for: manifests without probes would be flaky tests.
func (c *container) probe(ctx context.Context, group *sync.WaitGroup, p *Process) {
	if c.init && !c.sidecar() {
		return
	}
	group.Go(func() {
		if c.spec.StartupProbe != nil {
			if !c.ask(ctx, c.spec.StartupProbe, func(ok bool) bool {
				if ok {
					c.setStarted()
				} else {
					c.unhealthy(p)
				}
				return false
			}) {
				return
			}
		}
		if !c.isStarted() {
			return
		}
		if c.spec.LivenessProbe != nil {
			group.Go(func() {
				c.ask(ctx, c.spec.LivenessProbe, func(ok bool) bool {
					if !ok {
						c.unhealthy(p)
					}
					return ok
				})
			})
		}
		if c.spec.ReadinessProbe == nil {
			if c.bound(ctx, p) == nil {
				c.setReady(true)
			}
			return
		}
		c.ask(ctx, c.spec.ReadinessProbe, func(ok bool) bool {
			c.setReady(ok)
			return true
		})
	})
}

// unhealthy ends a process that failed its probe; run starts it again.
func (c *container) unhealthy(p *Process) {
	if c.w.spec().DeletionTimestamp == nil {
		grace := value(c.w.spec().Spec.TerminationGracePeriodSeconds, 30)
		p.Stop(time.Duration(grace) * time.Second)
	}
}

// ask probes in the probe's rhythm and says each change, by its thresholds,
// until say returns false. It returns false when ctx has ended.
func (c *container) ask(ctx context.Context, probe *corev1.Probe, say func(ok bool) bool) bool {
	seconds := func(n, otherwise int32) time.Duration {
		if n == 0 {
			n = otherwise
		}
		return time.Duration(n) * time.Second
	}
	period := seconds(probe.PeriodSeconds, 10)
	pause := seconds(probe.InitialDelaySeconds, 0)
	good, bad, last := int32(0), int32(0), 0
	patience := time.Now().Add(pause + time.Duration(max(1, probe.FailureThreshold))*period)
	for {
		select {
		case <-ctx.Done():
			return false
		case <-time.After(pause):
		}
		asking, cancel := context.WithTimeout(ctx, seconds(probe.TimeoutSeconds, 1))
		err := c.handle(asking, &probe.ProbeHandler)
		cancel()
		if ctx.Err() != nil {
			return false
		}
		pause = period
		if err == nil {
			good, bad = good+1, 0
			if good >= max(1, probe.SuccessThreshold) && last != 1 {
				last = 1
				if !say(true) {
					return true
				}
			}
			continue
		}
		good, bad = 0, bad+1
		failed := bad >= max(1, probe.FailureThreshold)
		if last == 0 {
			pause, failed = impatience, time.Now().After(patience)
		}
		if failed && last != -1 {
			last = -1
			if !say(false) {
				return true
			}
		}
	}
}

func (c *container) handle(ctx context.Context, h *corev1.ProbeHandler) error {
	switch {
	case h.HTTPGet != nil:
		return c.httpGet(ctx, h.HTTPGet)
	case h.TCPSocket != nil:
		return c.connect(ctx, h.TCPSocket.Host, h.TCPSocket.Port)
	case h.GRPC != nil:
		return c.connect(ctx, "", intstr.FromInt32(h.GRPC.Port))
	case h.Exec != nil:
		return c.exec(ctx, h.Exec.Command)
	}
	return fmt.Errorf("a probe of a kind that is not known here")
}

// host is where probes go: the node reaches the pod at its address.
func (c *container) host(name string) string {
	if name != "" {
		return name
	}
	if ips := c.w.addresses(); len(ips) > 0 {
		return ips[0]
	}
	return ""
}

func (c *container) port(p intstr.IntOrString) string {
	if p.Type == intstr.Int {
		return strconv.Itoa(p.IntValue())
	}
	for _, named := range c.spec.Ports {
		if named.Name == p.StrVal {
			return strconv.Itoa(int(named.ContainerPort))
		}
	}
	return p.StrVal
}

func (c *container) connect(ctx context.Context, host string, port intstr.IntOrString) error {
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", net.JoinHostPort(c.host(host), c.port(port)))
	if err != nil {
		return err
	}
	return conn.Close()
}

func (c *container) httpGet(ctx context.Context, get *corev1.HTTPGetAction) error {
	scheme := "http"
	if get.Scheme == corev1.URISchemeHTTPS {
		scheme = "https"
	}
	url := fmt.Sprintf("%s://%s/%s", scheme, net.JoinHostPort(c.host(get.Host), c.port(get.Port)), strings.TrimPrefix(get.Path, "/"))
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	for _, h := range get.HTTPHeaders {
		req.Header.Add(h.Name, h.Value)
		if strings.EqualFold(h.Name, "Host") {
			req.Host = h.Value
		}
	}
	// A kubelet does not verify either.
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}}
	res, err := client.Do(req)
	if err != nil {
		return err
	}
	defer res.Body.Close()
	if res.StatusCode < 200 || res.StatusCode >= 400 {
		return fmt.Errorf("GET %s: %s", url, res.Status)
	}
	return nil
}

// exec runs a command in the container.
func (c *container) exec(ctx context.Context, command []string) error {
	if len(command) == 0 {
		return fmt.Errorf("no command")
	}
	var out bytes.Buffer
	cmd := &exec.Cmd{
		Path: command[0], Args: command, Env: c.env, Dir: "/", Stdout: &out, Stderr: &out,
		SysProcAttr: &syscall.SysProcAttr{Chroot: c.root, Credential: c.cred, Setsid: true},
	}
	if err := c.w.network().do(cmd.Start); err != nil {
		return err
	}
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	select {
	case err := <-done:
		if err != nil {
			return fmt.Errorf("%q: %w: %s", command, err, out.String())
		}
		return nil
	case <-ctx.Done():
		_ = cmd.Process.Kill()
		<-done
		return ctx.Err()
	}
}

// bound waits until the container's ports are served. If it doesn't say which,
// that is when something is and nothing was added for two looks.
func (c *container) bound(ctx context.Context, p *Process) error {
	before := 0
	for {
		sockets := listening(p.Pid())
		all := len(c.spec.Ports) > 0
		for _, port := range c.spec.Ports {
			protocol := "tcp"
			if port.Protocol == corev1.ProtocolUDP {
				protocol = "udp"
			}
			all = all && sockets[fmt.Sprintf("%s:%d", protocol, port.ContainerPort)]
		}
		if all || len(c.spec.Ports) == 0 && len(sockets) > 0 && len(sockets) == before {
			return nil
		}
		before = len(sockets)
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(impatience / 2):
		}
	}
}

// listening lists the ports that are served in a process's network, "tcp:443".
func listening(pid int) map[string]bool {
	found := map[string]bool{}
	for _, table := range []string{"tcp", "tcp6", "udp", "udp6"} {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/net/%s", pid, table))
		if err != nil {
			continue
		}
		protocol := strings.TrimSuffix(table, "6")
		for _, line := range strings.Split(string(b), "\n")[1:] {
			fields := strings.Fields(line)
			// 0A is LISTEN; a socket of UDP that isn't connected is in state 07.
			if len(fields) < 4 || protocol == "tcp" && fields[3] != "0A" || protocol == "udp" && fields[3] != "07" {
				continue
			}
			_, hex, _ := strings.Cut(fields[1], ":")
			if port, err := strconv.ParseUint(hex, 16, 16); err == nil {
				found[fmt.Sprintf("%s:%d", protocol, port)] = true
			}
		}
	}
	return found
}
