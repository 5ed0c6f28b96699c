//go:build unix

package interop

import (
	"context"
	"database/sql"
	"fmt"
	"net"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"
)

// A pool of connections to MariaDB asks for more than the service may have. It gets an
// error at once, what is open goes on, and so do the clients of another service at the
// same server. A place that is given back is taken by the next connection.
func TestServiceLimitWithMariaDB(t *testing.T) {
	const most = 3
	w := newWorld(t)
	server := w.mariadb(t)
	limited, other := net.JoinHostPort("127.0.0.1", freePort(t)), net.JoinHostPort("127.0.0.1", freePort(t))
	g := startGateway(t, "--admin", "127.0.0.1:0", "--config", w.write(t, "culvert.yaml", fmt.Sprintf(`
listeners:
  - {address: %q, service: "db.example.test:3306"}
  - {address: %q, service: "other.example.test:3306"}
log: {format: json, level: debug}
services:
  - {name: db.example.test, ports: [3306], endpoints: [%[3]q], limits: {connections: %[4]d}}
  - {name: other.example.test, ports: [3306], endpoints: [%[3]q]}
`, limited, other, server, most)))
	cfg := mysql.NewConfig()
	cfg.User, cfg.Passwd, cfg.Net, cfg.Addr, cfg.DBName = mysqlUser, mysqlPassword, "tcp", limited, "shop"
	cfg.Logger = &mysql.NopLogger{}
	connector, err := mysql.NewConnector(cfg)
	must(t, err)
	pool := sql.OpenDB(connector)
	defer pool.Close()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	ask := func(c *sql.Conn) {
		t.Helper()
		var answer string
		if err := c.QueryRowContext(ctx, mysqlQuery).Scan(&answer); err != nil || answer != mysqlAnswer {
			t.Errorf("an open connection answers %q, %v; want %q", answer, err, mysqlAnswer)
		}
	}
	var open []*sql.Conn
	for range most {
		c, err := pool.Conn(ctx)
		must(t, err)
		open = append(open, c)
		ask(c)
	}
	began := time.Now()
	if c, err := pool.Conn(ctx); err == nil {
		_ = c.Close()
		t.Errorf("a connection over the limit of %d was made", most)
	}
	if took := time.Since(began); took > patience/2 {
		t.Errorf("a connection over the limit was refused after %v", took)
	}
	for _, c := range open {
		ask(c)
	}
	if answer, err := askMySQL(t, other, mysqlPassword); answer != mysqlAnswer || err != nil {
		t.Errorf("the other service answers %q, %v", answer, err)
	}
	g.await(t, "logged the refusal", func() bool {
		for _, l := range g.lines() {
			if l.Msg == "refused" && l.Service == "db.example.test" && l.Reason == "overload" {
				return true
			}
		}
		return false
	})
	pool.SetMaxIdleConns(0) // what is closed is closed
	must(t, open[0].Close())
	g.await(t, "a free place", func() bool {
		c, err := pool.Conn(ctx)
		if err == nil {
			open[0] = c
		}
		return err == nil
	})
	for _, c := range open {
		ask(c)
		must(t, c.Close())
	}
}
