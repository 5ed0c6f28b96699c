//go:build unix

package interop

import (
	"bufio"
	"context"
	"crypto/sha1"
	"database/sql"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"

	"culvert.dev/internal/testnet"
)

// What the database of these tests asks for, and what it answers to any query.
const (
	mysqlUser, mysqlPassword = "web", "through the gateway"
	mysqlSalt                = "abcdefghijklmnopqrst"
	mysqlAnswer              = "orders"
)

// serveMySQL is as much of a MySQL server as a client needs for a query: it
// greets, has the password proved by mysql_native_password, and answers.
func serveMySQL(t *testing.T) (addr string) {
	return testnet.Service(t, func(c net.Conn) {
		s := &mysqlSession{Conn: c, r: bufio.NewReader(c)}
		// CLIENT_LONG_PASSWORD, CONNECT_WITH_DB, PROTOCOL_41, SECURE_CONNECTION and
		// PLUGIN_AUTH.
		s.say("\x0a8.0.36\x00\x08\x00\x00\x00" + mysqlSalt[:8] + "\x00\x09\x82\xff\x02\x00\x08\x00\x15" + "\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00" + mysqlSalt[8:] + "\x00mysql_native_password\x00")
		login := s.hear()
		want := "\x00" + mysqlUser + "\x00\x14" + scramble() + "shop\x00"
		if len(login) < 32 || !(len(login) >= 31+len(want) && login[31:31+len(want)] == want) {
			s.say("\xff\x15\x04#28000Access denied")
			return
		}
		const ok, end = "\x00\x00\x00\x02\x00\x00\x00", "\xfe\x00\x00\x02\x00"
		s.say(ok)
		for {
			s.seq = 0
			switch command := s.hear(); {
			case command == "" || command[0] == 1: // COM_QUIT, or gone
				return
			case command[0] == 3: // COM_QUERY: one column, one row
				s.say("\x01")
				s.say("\x03def\x00\x00\x00\x04name\x00\x0c\x21\x00\xff\x00\x00\x00\xfd\x00\x00\x00\x00\x00")
				s.say(end)
				s.say(string(rune(len(mysqlAnswer))) + mysqlAnswer)
				s.say(end)
			default: // COM_PING
				s.say(ok)
			}
		}
	})
}

// scramble is the proof of the password: of the salt, and of what a server has
// of it.
func scramble() string {
	once := sha1.Sum([]byte(mysqlPassword))
	twice := sha1.Sum(once[:])
	mask := sha1.Sum(append([]byte(mysqlSalt), twice[:]...))
	for i := range mask {
		mask[i] ^= once[i]
	}
	return string(mask[:])
}

// A mysqlSession reads and writes packets: three bytes of length, one that
// counts them, and what they say.
type mysqlSession struct {
	net.Conn
	r   *bufio.Reader
	seq byte
}

func (s *mysqlSession) say(payload string) {
	head := binary.LittleEndian.AppendUint32(nil, uint32(len(payload))|uint32(s.seq)<<24)
	s.seq++
	_, _ = s.Write(append(head, payload...))
}

// hear returns a packet's payload, "" where there is none.
func (s *mysqlSession) hear() string {
	var head [4]byte
	if _, err := io.ReadFull(s.r, head[:]); err != nil {
		return ""
	}
	payload := make([]byte, binary.LittleEndian.Uint32(head[:])&0xffffff)
	_, _ = io.ReadFull(s.r, payload)
	s.seq = head[3] + 1
	return string(payload)
}

// askMySQL asks the database at addr with Go's usual client.
func askMySQL(t *testing.T, addr, password string) (answer string, err error) {
	t.Helper()
	cfg := mysql.NewConfig()
	cfg.User, cfg.Passwd, cfg.Net, cfg.Addr, cfg.DBName = mysqlUser, password, "tcp", addr, "shop"
	cfg.Logger = &mysql.NopLogger{}
	connector, err := mysql.NewConnector(cfg)
	must(t, err)
	db := sql.OpenDB(connector)
	defer db.Close()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if err := db.PingContext(ctx); err != nil {
		return "", err
	}
	err = db.QueryRowContext(ctx, "SELECT name FROM services").Scan(&answer)
	return answer, err
}

// The database of these tests tells a password from another.
func TestMySQLDirectly(t *testing.T) {
	addr := serveMySQL(t)
	start := time.Now()
	if got, err := askMySQL(t, addr, mysqlPassword); got != mysqlAnswer || err != nil {
		t.Errorf("got %q, %v after %v, want %q", got, err, time.Since(start), mysqlAnswer)
	}
	var denied *mysql.MySQLError
	if _, err := askMySQL(t, addr, "guess"); !errors.As(err, &denied) || denied.Number != 1045 {
		t.Errorf("with a wrong password: got %v, want error 1045", err)
	}
}
